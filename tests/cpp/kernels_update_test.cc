// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "cuda/emulation/host_kernels.h"
#include "kernel_rig.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

using test::Memory;
using test::message_of;
using test::Random;
using test::RunInShape;

template <typename T>
constexpr DType kType = DType::float32;
template <>
constexpr DType kType<double> = DType::float64;
template <>
constexpr DType kType<Half> = DType::float16;
template <>
constexpr DType kType<BFloat16> = DType::bfloat16;

// torch's _foreach_ operations on one tensor: a pass over memory each, as on a device, where a sum
// with a product in it is fused.
template <typename T>
class Foreach {
 public:
  using A = kernels::Arithmetic<T>;
  using C = typename A::Type;
  using Tensor = std::vector<T>;

  static void mul(Tensor& a, double by) {
    each(a, [&](size_t, C x) { return x * static_cast<C>(by); });
  }
  static void add(Tensor& a, double value) {
    each(a, [&](size_t, C x) { return x + static_cast<C>(value); });
  }
  static void add(Tensor& a, const Tensor& b, double alpha) {
    each(a, [&](size_t i, C x) { return std::fma(static_cast<C>(alpha), A::load(b[i]), x); });
  }
  static void lerp(Tensor& a, const Tensor& end, double weight) {
    const C w = static_cast<C>(weight);
    each(a, [&](size_t i, C x) {
      const C to = A::load(end[i]);
      return std::abs(w) < C{0.5} ? std::fma(w, to - x, x) : std::fma(x - to, C{1} - w, to);
    });
  }
  static void addcmul(Tensor& a, const Tensor& b, const Tensor& c, double value) {
    const C v = static_cast<C>(value);
    each(a, [&](size_t i, C x) {
      const C y = A::load(b[i]), z = A::load(c[i]);
      return v == 1 ? std::fma(y, z, x) : std::fma(v, y * z, x);
    });
  }
  static void addcdiv(Tensor& a, const Tensor& b, const Tensor& c, double value) {
    each(a, [&](size_t i, C x) {
      return std::fma(static_cast<C>(value), A::load(b[i]) / A::load(c[i]), x);
    });
  }
  static void sqrt(Tensor& a) {
    each(a, [](size_t, C x) { return std::sqrt(x); });
  }
  static void div(Tensor& a, double by) {
    each(a, [&](size_t, C x) { return x / static_cast<C>(by); });
  }

 private:
  template <typename F>
  static void each(Tensor& a, F f) {
    for (size_t i = 0; i < a.size(); ++i) a[i] = A::store(f(i, A::load(a[i])));
  }
};

// torch/optim/sgd.py, _multi_tensor_sgd.
template <typename T>
void torch_sgd(std::vector<T>& param, std::vector<T> grad, std::vector<T>& buffer, bool first,
               const SgdOptions& o) {
  using F = Foreach<T>;
  F::mul(grad, o.grad_scale);
  if (o.maximize) F::mul(grad, -1);
  if (o.weight_decay != 0) F::add(grad, param, o.weight_decay);
  if (o.momentum != 0) {
    if (first) {
      buffer = grad;
    } else {
      F::mul(buffer, o.momentum);
      F::add(buffer, grad, 1 - o.dampening);
    }
    if (o.nesterov) {
      F::add(grad, buffer, o.momentum);
    } else {
      grad = buffer;
    }
  }
  F::add(param, grad, -o.lr);
}

// torch/optim/adam.py, _multi_tensor_adam.
template <typename T>
void torch_adam(std::vector<T>& param, std::vector<T> grad, std::vector<T>& exp_avg,
                std::vector<T>& exp_avg_sq, int64_t step, const AdamOptions& o) {
  using F = Foreach<T>;
  F::mul(grad, o.grad_scale);
  if (o.maximize) F::mul(grad, -1);
  if (o.weight_decay != 0 && o.decoupled) F::mul(param, 1 - o.lr * o.weight_decay);
  if (o.weight_decay != 0 && !o.decoupled) F::add(grad, param, o.weight_decay);
  F::lerp(exp_avg, grad, 1 - o.beta1);
  F::mul(exp_avg_sq, o.beta2);
  F::addcmul(exp_avg_sq, grad, grad, 1 - o.beta2);
  const double correction1 = 1 - std::pow(o.beta1, step), correction2 = 1 - std::pow(o.beta2, step);
  std::vector<T> denominator = exp_avg_sq;
  F::sqrt(denominator);
  F::div(denominator, std::pow(correction2, 0.5));
  F::add(denominator, o.eps);
  F::addcdiv(param, exp_avg, denominator, -(o.lr / correction1));
}

// A tensor at any alignment, and what it should hold.
template <typename T>
class Tensor {
 public:
  Tensor(int64_t count, Random& random)
      : memory_(count * int64_t{sizeof(T)},
                random.one_in(2) ? 0 : random(0, 16 / int64_t{sizeof(T)} - 1) * int64_t{sizeof(T)}),
        want(static_cast<size_t>(count)) {}

  void fill(Random& random, bool positive = false) {
    for (T& v : want) {
      const double x = static_cast<double>(random(-100000, 100000)) / 30000;
      using A = kernels::Arithmetic<T>;
      v = A::store(static_cast<typename A::Type>(positive ? x * x : x));
    }
    std::ranges::copy(want, memory_.template as<T>().begin());
  }
  void* data() { return memory_.data(); }
  bool right() { return std::ranges::equal(memory_.bytes(), std::as_bytes(std::span(want))); }

 private:
  Memory memory_;

 public:
  std::vector<T> want;
};

template <typename T>
struct Parameter {
  Tensor<T> param, grad, first_state, second_state;
  int64_t steps_done;

  Parameter(Random& random, int64_t count)
      : param(count, random),
        grad(count, random),
        first_state(count, random),
        second_state(count, random),
        steps_done(random(0, 3) * random(0, 50)) {
    param.fill(random);
    first_state.fill(random);
    second_state.fill(random, true);
  }
};

template <typename T>
std::vector<std::unique_ptr<Parameter<T>>> parameters(Random& random) {
  std::vector<std::unique_ptr<Parameter<T>>> out;
  const int64_t n = random.one_in(10) ? random(120, 300) : random(1, 6);
  for (int64_t i = 0; i < n; ++i) {
    out.push_back(
        std::make_unique<Parameter<T>>(random, random.one_in(4) ? random(0, 3) : random(1, 150)));
  }
  return out;
}

double either(Random& random, std::initializer_list<double> values) {
  return values.begin()[random(0, static_cast<int64_t>(values.size()) - 1)];
}

template <typename T>
void expect_sgd() {
  Random random(7);
  for (int round = 0; round < 60; ++round) {
    const SgdOptions options{.lr = either(random, {0.1, 1e-3, 1}),
                             .momentum = either(random, {0, 0.9, 0.5}),
                             .dampening = either(random, {0, 0, 0.3}),
                             .weight_decay = either(random, {0, 5e-4, 0.1}),
                             .nesterov = random.one_in(2),
                             .maximize = random.one_in(3),
                             .grad_scale = either(random, {1, 1, 0.125, 1.0 / 3})};
    auto all = parameters<T>(random);
    for (int step = 0; step < 3; ++step) {
      std::vector<SgdTensor> tensors;
      for (auto& p : all) {
        const bool first = p->steps_done++ == 0;
        p->grad.fill(random);
        torch_sgd(p->param.want, p->grad.want, p->first_state.want, first, options);
        void* momentum = options.momentum != 0 ? p->first_state.data() : nullptr;
        tensors.push_back({p->param.data(), p->grad.data(), momentum,
                           static_cast<int64_t>(p->param.want.size()), first});
      }
      RunInShape run = test::shapes()[static_cast<size_t>(random(1, 3))];
      run.large = random.one_in(2);
      kernels::update_sgd(tensors, kType<T>, options, run);
      for (auto& p : all) {
        ASSERT_TRUE(p->param.right() && p->grad.right() && p->first_state.right())
            << name(kType<T>) << ", round " << round << ", step " << step;
      }
    }
  }
}

TEST(KernelsUpdate, SgdDoesWhatTorchDoes) {
  expect_sgd<float>();
  expect_sgd<double>();
  expect_sgd<Half>();
  expect_sgd<BFloat16>();
}

template <typename T>
void expect_adam() {
  Random random(8);
  for (int round = 0; round < 60; ++round) {
    const AdamOptions options{.lr = either(random, {0.1, 1e-3, 1}),
                              .beta1 = either(random, {0.9, 0.5, 0.3, 0}),
                              .beta2 = either(random, {0.999, 0.95, 0}),
                              .eps = either(random, {1e-8, 1e-3}),
                              .weight_decay = either(random, {0, 0.01, 0.1}),
                              .decoupled = random.one_in(2),
                              .maximize = random.one_in(3),
                              .grad_scale = either(random, {1, 1, 0.125, 1.0 / 3})};
    auto all = parameters<T>(random);
    for (int step = 0; step < 3; ++step) {
      std::vector<AdamTensor> tensors;
      for (auto& p : all) {
        p->grad.fill(random);
        torch_adam(p->param.want, p->grad.want, p->first_state.want, p->second_state.want,
                   ++p->steps_done, options);
        tensors.push_back({p->param.data(), p->grad.data(), p->first_state.data(),
                           p->second_state.data(), static_cast<int64_t>(p->param.want.size()),
                           p->steps_done});
      }
      RunInShape run = test::shapes()[static_cast<size_t>(random(1, 3))];
      run.large = random.one_in(2);
      kernels::update_adam(tensors, kType<T>, options, run);
      for (auto& p : all) {
        ASSERT_TRUE(p->param.right() && p->grad.right() && p->first_state.right() &&
                    p->second_state.right())
            << name(kType<T>) << ", round " << round << ", step " << step;
      }
    }
  }
}

TEST(KernelsUpdate, AdamDoesWhatTorchDoes) {
  expect_adam<float>();
  expect_adam<double>();
  expect_adam<Half>();
  expect_adam<BFloat16>();
}

// In float, beta2^1000000 and what is left of 1 after it would be lost.
TEST(KernelsUpdate, AdamCorrectsItsBiasInDouble) {
  const AdamOptions options{.lr = 0.5, .beta1 = 0.9, .beta2 = 0.9999999, .eps = 0};
  float param = 0, exp_avg = 0, exp_avg_sq = 0;
  const float grad = 1;
  const AdamTensor tensor{&param, &grad, &exp_avg, &exp_avg_sq, 1, 1};
  host::update_adam({&tensor, 1}, DType::float32, options);
  // The first step goes by lr, whatever the betas.
  EXPECT_NEAR(param, -0.5, 1e-6);
}

TEST(KernelsUpdate, RefusesWhatItCannotDo) {
  float memory[4] = {};
  const SgdTensor no_buffer{memory, memory, nullptr, 1, false};
  EXPECT_NE(message_of<UsageError>([&] {
              host::update_sgd({&no_buffer, 1}, DType::float32, {.lr = 1, .momentum = 0.9});
            }).find("momentum"),
            std::string::npos);
  EXPECT_NE(message_of<UsageError>([&] {
              host::update_sgd({&no_buffer, 1}, DType::int32, {.lr = 1});
            }).find("int32"),
            std::string::npos);
  const AdamTensor step_zero{memory, memory, memory, memory, 1, 0};
  EXPECT_NE(message_of<UsageError>([&] {
              host::update_adam({&step_zero, 1}, DType::float32, {.lr = 1});
            }).find("step"),
            std::string::npos);
}

}  // namespace
}  // namespace usbyte
