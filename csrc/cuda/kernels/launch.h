// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <type_traits>
#include <utility>

#include "copy.h"
#include "cuda/kernel_checks.h"
#include "fill.h"
#include "gather_rows.h"
#include "groups.h"
#include "partition.h"
#include "scatter_add.h"
#include "update.h"

// From the arguments of Cuda's kernel methods to kernels, for the device and for the host alike.
// `run(kernel)` runs one; `run.large_tables()` says whether its parameters may exceed 4 KB.
namespace usbyte::kernels {

/// Pieces of a table beyond which it takes no more, so that 32 bits count them.
constexpr uint32_t kMostPieces = uint32_t{1} << 30;

/// Fills `table` with all items, and calls `run` whenever it is full and at the end. `make(item,
/// begin)` is the entry for an item's elements from `begin` on.
template <typename Table, typename Item, typename Make, typename Run>
void run_tables(Table& table, std::span<const Item> items, Make make, Run run) {
  table.size = table.pieces = 0;
  for (const Item& item : items) {
    for (int64_t begin = 0; begin < item.count; begin += kMostElements) {
      if (table.size == table.kCapacity || table.pieces > kMostPieces) {
        run();
        table.size = table.pieces = 0;
      }
      auto& entry = table.entries[table.size++];
      entry = make(item, begin);
      entry.count = static_cast<uint32_t>(std::min(item.count - begin, kMostElements));
      entry.first_piece = table.pieces;
      table.pieces += entry.pieces();
    }
  }
  if (table.size > 0) run();
}

/// Calls `launch` with the bytes of the table, as a type, that holds so many entries.
template <typename Entry, typename Run, typename Launch>
void with_table_bytes(size_t entries, const Run& run, Launch launch) {
  if (entries > Table<Entry, kSmallTableBytes>::kCapacity && run.large_tables()) {
    launch(std::integral_constant<size_t, kLargeTableBytes>{});
  } else {
    launch(std::integral_constant<size_t, kSmallTableBytes>{});
  }
}

template <typename Convert, typename Run>
void copy_with(Convert convert, std::span<const CopySegment> segments, Run& run) {
  using From = typename Convert::From;
  using To = typename Convert::To;
  const auto make = [](const CopySegment& s, int64_t begin) {
    return CopyEntry<From, To>{{static_cast<To*>(s.target) + begin, 0, 0},
                               static_cast<const From*>(s.source) + begin};
  };
  with_table_bytes<CopyEntry<From, To>>(segments.size(), run, [&](auto bytes) {
    CopyKernel<Convert, bytes> kernel;
    kernel.convert = convert;
    run_tables(kernel.table, segments, make, [&] { run(kernel); });
  });
}

template <typename From, typename Run>
void copy_from(DType to, float scale, std::span<const CopySegment> segments, Run& run) {
  if (to == DType::float32) return copy_with(Scaled<From, float>{scale}, segments, run);
  if (to == DType::float16) return copy_with(Scaled<From, Half>{scale}, segments, run);
  copy_with(Scaled<From, BFloat16>{scale}, segments, run);
}

template <typename Run>
void copy_segments(std::span<const CopySegment> segments, DType from, DType to, double scale,
                   Run& run) {
  check_copy(segments, from, to, scale);
  if (from == to && scale == 1) {
    const int64_t size = itemsize(from);
    if (size == 1) return copy_with(Same<uint8_t>{}, segments, run);
    if (size == 2) return copy_with(Same<uint16_t>{}, segments, run);
    if (size == 4) return copy_with(Same<uint32_t>{}, segments, run);
    return copy_with(Same<uint64_t>{}, segments, run);
  }
  if (from == DType::float64) return copy_with(Scaled<double, double>{scale}, segments, run);
  const auto single = static_cast<float>(scale);
  if (from == DType::float32) return copy_from<float>(to, single, segments, run);
  if (from == DType::float16) return copy_from<Half>(to, single, segments, run);
  copy_from<BFloat16>(to, single, segments, run);
}

template <typename T, typename Run>
void fill_with(T value, void* target, int64_t count, Run& run) {
  for (int64_t begin = 0; begin < count; begin += kMostElements) {
    const auto part = static_cast<uint32_t>(std::min(count - begin, kMostElements));
    run(FillKernel<T>{{static_cast<T*>(target) + begin, part, 0}, value});
  }
}

template <typename Run>
void fill(void* target, DType dtype, int64_t count, double value, Run& run) {
  const uint64_t bits = check_fill(target, dtype, count, value);
  const int64_t size = itemsize(dtype);
  if (size == 1) return fill_with(static_cast<uint8_t>(bits), target, count, run);
  if (size == 2) return fill_with(static_cast<uint16_t>(bits), target, count, run);
  if (size == 4) return fill_with(static_cast<uint32_t>(bits), target, count, run);
  fill_with(bits, target, count, run);
}

/// Calls `with` with a value of the type that `dtype`, a floating-point one, names.
template <typename With>
void with_floating(DType dtype, With with) {
  if (dtype == DType::float32) return with(float{});
  if (dtype == DType::float64) return with(double{});
  if (dtype == DType::float16) return with(Half{});
  with(BFloat16{});
}

template <typename Run>
void scatter_add(void* target, const int64_t* rows, const void* values, DType dtype, int64_t count,
                 int64_t width, Run& run) {
  check_scatter_add(target, rows, values, dtype, count, width);
  if (count == 0 || width == 0) return;
  with_floating(dtype, [&](auto zero) {
    using T = decltype(zero);
    with_pieces<T>(target, values, width, [&](auto elements, int64_t columns) {
      run(ScatterAddKernel<T, elements>{static_cast<T*>(target), rows,
                                        static_cast<const T*>(values), count, columns});
    });
  });
}

template <typename Convert, typename Run>
void gather_with(Convert convert, void* target, const void* source, const int32_t* positions,
                 int64_t count, int64_t width, Run& run) {
  using T = typename Convert::To;
  with_pieces<T>(target, source, width, [&](auto elements, int64_t columns) {
    run(GatherRowsKernel<Convert, elements>{convert, static_cast<T*>(target),
                                            static_cast<const T*>(source), positions, count,
                                            columns});
  });
}

template <typename Run>
void gather_rows(void* target, const void* source, const int32_t* positions, DType dtype,
                 int64_t count, int64_t width, double scale, Run& run) {
  check_gather_rows(target, source, positions, dtype, count, width, scale);
  if (count == 0 || width == 0) return;
  const auto gather = [&](auto convert) {
    gather_with(convert, target, source, positions, count, width, run);
  };
  if (scale != 1) {
    return with_floating(dtype, [&](auto zero) {
      using T = decltype(zero);
      gather(Scaled<T, T>{static_cast<typename Arithmetic<T>::Type>(scale)});
    });
  }
  const int64_t size = itemsize(dtype);
  if (size == 1) return gather(Same<uint8_t>{});
  if (size == 2) return gather(Same<uint16_t>{});
  if (size == 4) return gather(Same<uint32_t>{});
  gather(Same<uint64_t>{});
}

template <typename Run>
void partition_rows(const RowPartition& partition, const int64_t* ids, const int64_t* count,
                    int64_t most, int32_t* table, const RowGroups& groups, Run& run) {
  check_partition(partition, ids, count, most, table, groups);
  fill(groups.tallies, DType::int32, partition.tallies_size(), 0, run);
  if (most == 0 && !count) return;
  fill(table, DType::int32, partition.table_size(), kEmpty, run);
  const PartitionPlaces places{table, groups.tallies, partition.servers, partition.slots,
                               partition.serial};
  ClaimKernel<Atomics> claim{
      places,
      sparse::HashPartitioner(partition.rows, partition.servers, partition.seed),
      partition.rows,
      {},
      partition.hashes,
      ids,
      count,
      most};
  // Not those of the deal: which rows meet on a server must not tell which meet in a slot.
  uint64_t key = mix(~partition.seed);
  for (uint64_t& k : claim.keys) k = key = mix(key);
  run(claim);
  run(CountKernel{{places}});
  run(GatherKernel{{places}, ids, groups.ids, groups.positions});
}

/// Calls `with` with an object of the codec's format.
template <typename With>
void with_format(GroupCodec::Kind kind, With with) {
  using Kind = GroupCodec::Kind;
  if (kind == Kind::fp16) return with(CastFormat<Half>{});
  if (kind == Kind::bf16) return with(CastFormat<BFloat16>{});
  if (kind == Kind::int8) return with(ScaledFormat<Int8>{});
  if (kind == Kind::e4m3) return with(ScaledFormat<Fp8<3, -6, 448>>{});
  if (kind == Kind::e5m2) return with(ScaledFormat<Fp8<2, -14, 57344>>{});
  if (kind == Kind::qsgd2) return with(QsgdFormat<2>{});
  if (kind == Kind::qsgd4) return with(QsgdFormat<4>{});
  if (kind == Kind::qsgd8) return with(QsgdFormat<8>{});
  if (kind == Kind::terngrad) return with(TernGradFormat{});
  if (kind == Kind::majority) return with(MajorityFormat{});
  if (kind == Kind::efsignsgd) return with(EfSignFormat{});
  with(OneBitFormat{});
}

/// Calls `with` with a value of the type that `dtype`, a floating-point one but float64, names.
template <typename With>
void with_coded(DType dtype, With with) {
  if (dtype == DType::float32) return with(float{});
  if (dtype == DType::float16) return with(Half{});
  with(BFloat16{});
}

/// Numbers and bits of a message of `count` elements, from element `begin` on, which begins a
/// group.
template <typename Format, typename Byte>
std::pair<Byte*, Byte*> parts_of(Byte* message, int64_t count, int64_t begin) {
  constexpr int64_t kElements = Format::kElements, kNumbers = 4 * Format::kNumbers;
  const int64_t groups = (count + kElements - 1) / kElements;
  return {message + begin / kElements * kNumbers,
          message + groups * kNumbers + begin / 8 * Format::kBits};
}

template <typename Run>
void encode_groups(GroupCodec codec, std::span<const GroupEncoding> runs, DType dtype, Run& run) {
  check_encode(codec, runs, dtype);
  with_format(codec.kind, [&](auto format) {
    using Format = decltype(format);
    with_coded(dtype, [&](auto zero) {
      using T = decltype(zero);
      const auto make = [](const GroupEncoding& r, int64_t begin) {
        const auto [numbers, packed] = parts_of<Format>(r.message, r.count, begin);
        EncodeEntry<Format, T> entry;
        entry.values = static_cast<const T*>(r.values) + begin;
        entry.numbers = numbers;
        entry.packed = packed;
        entry.kept = r.kept ? r.kept + begin : nullptr;
        entry.key = r.key + static_cast<uint64_t>(begin);
        return entry;
      };
      const auto encode = [&](auto keeps) {
        EncodeKernel<Format, T, keeps> kernel;
        const bool mean = codec.momentum >= 0;
        kernel.work.old = mean ? static_cast<float>(codec.momentum) : 0;
        kernel.work.fresh = mean ? static_cast<float>(1 - codec.momentum) : 0;
        run_tables(kernel.work.table, runs, make, [&] { run(kernel); });
      };
      // Of their own for who keeps nothing: they take fewer registers.
      if (std::ranges::any_of(runs, [](const GroupEncoding& r) { return r.kept != nullptr; })) {
        encode(std::true_type{});
      } else {
        encode(std::false_type{});
      }
    });
  });
}

template <typename Run>
void decode_groups(GroupCodec codec, std::span<const GroupDecoding> runs, DType dtype, int ranks,
                   int64_t stride, Run& run) {
  check_decode(codec, runs, dtype, ranks, stride);
  with_format(codec.kind, [&](auto format) {
    using Format = decltype(format);
    with_coded(dtype, [&](auto zero) {
      using T = decltype(zero);
      const auto make = [](const GroupDecoding& r, int64_t begin) {
        const auto [numbers, packed] = parts_of<Format>(r.message, r.count, begin);
        DecodeEntry<T> entry;
        entry.values = static_cast<T*>(r.values) + begin;
        entry.numbers = numbers;
        entry.packed = packed;
        return entry;
      };
      DecodeKernel<Format, T> kernel;
      kernel.ranks = ranks;
      kernel.stride = stride;
      run_tables(kernel.table, runs, make, [&] { run(kernel); });
    });
  });
}

template <typename T>
SgdRule<T> sgd_rule(const SgdOptions& o) {
  using Compute = typename SgdRule<T>::Compute;
  return {.minus_lr = static_cast<Compute>(-o.lr),
          .momentum = static_cast<Compute>(o.momentum),
          .one_minus_dampening = static_cast<Compute>(1 - o.dampening),
          .weight_decay = static_cast<Compute>(o.weight_decay),
          .grad_scale = static_cast<Compute>(o.maximize ? -o.grad_scale : o.grad_scale),
          .nesterov = o.nesterov};
}

template <typename Run>
void update_sgd(std::span<const SgdTensor> tensors, DType dtype, const SgdOptions& options,
                Run& run) {
  check_sgd(tensors, dtype, options);
  with_floating(dtype, [&](auto zero) {
    using T = decltype(zero);
    const auto make = [&](const SgdTensor& t, int64_t begin) {
      T* const momentum = options.momentum != 0 ? static_cast<T*>(t.momentum) + begin : nullptr;
      return SgdEntry<T>{{static_cast<T*>(t.param) + begin, 0, 0},
                         static_cast<const T*>(t.grad) + begin,
                         momentum,
                         t.first};
    };
    with_table_bytes<SgdEntry<T>>(tensors.size(), run, [&](auto bytes) {
      UpdateKernel<SgdRule<T>, bytes> kernel;
      kernel.rule = sgd_rule<T>(options);
      run_tables(kernel.table, tensors, make, [&] { run(kernel); });
    });
  });
}

template <typename T>
AdamRule<T> adam_rule(const AdamOptions& o) {
  using Compute = typename AdamRule<T>::Compute;
  return {.one_minus_beta1 = static_cast<Compute>(1 - o.beta1),
          .beta2 = static_cast<Compute>(o.beta2),
          .one_minus_beta2 = static_cast<Compute>(1 - o.beta2),
          .eps = static_cast<Compute>(o.eps),
          .grad_scale = static_cast<Compute>(o.maximize ? -o.grad_scale : o.grad_scale),
          .weight_decay = static_cast<Compute>(o.decoupled ? 0 : o.weight_decay),
          .shrink = static_cast<Compute>(o.decoupled ? 1 - o.lr * o.weight_decay : 1)};
}

template <typename Run>
void update_adam(std::span<const AdamTensor> tensors, DType dtype, const AdamOptions& options,
                 Run& run) {
  check_adam(tensors, dtype);
  with_floating(dtype, [&](auto zero) {
    using T = decltype(zero);
    using Compute = typename AdamRule<T>::Compute;
    const auto make = [&](const AdamTensor& t, int64_t begin) {
      // In double, as Python computes them.
      const auto step = static_cast<double>(t.step);
      const double step_size = options.lr / (1 - std::pow(options.beta1, step));
      const double bias_correction2_sqrt = std::pow(1 - std::pow(options.beta2, step), 0.5);
      return AdamEntry<T>{
          {static_cast<T*>(t.param) + begin, 0, 0}, static_cast<const T*>(t.grad) + begin,
          static_cast<T*>(t.exp_avg) + begin,       static_cast<T*>(t.exp_avg_sq) + begin,
          static_cast<Compute>(-step_size),         static_cast<Compute>(bias_correction2_sqrt)};
    };
    with_table_bytes<AdamEntry<T>>(tensors.size(), run, [&](auto bytes) {
      UpdateKernel<AdamRule<T>, bytes> kernel;
      kernel.rule = adam_rule<T>(options);
      run_tables(kernel.table, tensors, make, [&] { run(kernel); });
    });
  });
}

}  // namespace usbyte::kernels
