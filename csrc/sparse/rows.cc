// SPDX-License-Identifier: Apache-2.0
#include "rows.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <type_traits>
#include <utility>

#include "support/half.h"
#include "usbyte/error.h"

namespace usbyte::sparse {
namespace {

enum class Form : int64_t { keys, bitmap, all };

struct Head {
  int64_t count;
  Form form;
};

int64_t padded(int64_t bytes) { return (bytes + 7) / 8 * 8; }

int64_t bitmap_bytes(int64_t range) { return (range + 63) / 64 * 8; }

int64_t keys_bytes(int64_t range, int64_t count) { return padded(count * Keys::width(range)); }

int64_t keys_bytes(Form form, int64_t range, int64_t count) {
  switch (form) {
    case Form::keys:
      return keys_bytes(range, count);
    case Form::bitmap:
      return bitmap_bytes(range);
    case Form::all:
      break;
  }
  return 0;
}

constexpr int64_t kHead = sizeof(Head);

/// Calls body(T{}) with the type of elements; float for what adds in single precision.
template <typename Body>
void with_type(DType dtype, Body body) {
  switch (dtype) {
    case DType::float32:
      return body(float{});
    case DType::float64:
      return body(double{});
    case DType::float16:
      return body(Half{});
    case DType::bfloat16:
      return body(BFloat16{});
    case DType::int32:
      return body(uint32_t{});  // which wraps around
    case DType::int64:
      return body(uint64_t{});
    default:
      throw UsageError("rows of " + std::string(name(dtype)) + " cannot be added up");
  }
}

template <typename T>
T sum(T a, T b) {
  if constexpr (std::is_arithmetic_v<T>) {
    return a + b;
  } else {
    return from_float<T>(to_float(a) + to_float(b));
  }
}

template <typename T>
void add_rows(const SparseShape& shape, const RowSet& set, const RowsMessage& message, T* sums) {
  const T* row = reinterpret_cast<const T*>(message.values);
  for (int64_t i = 0; i < message.count(); ++i, row += shape.width) {
    T* const into = sums + set.position(message.keys[i]) * shape.width;
    for (int64_t e = 0; e < shape.width; ++e) into[e] = sum(into[e], row[e]);
  }
}

}  // namespace

int64_t message_bytes(const SparseShape& shape, int64_t range, int64_t count) {
  return padded(kHead + keys_bytes(range, count) + count * shape.row_bytes());
}

RowsWriter::RowsWriter(std::byte* message, const SparseShape& shape, int64_t range, int64_t count)
    : keys_(message + kHead),
      values_(keys_ + keys_bytes(range, count)),
      row_bytes_(shape.row_bytes()),
      wide_(Keys::width(range) == 8) {
  const Head head{count, Form::keys};
  std::memcpy(message, &head, kHead);
}

Buffer write_set(const SparseShape& shape, int64_t range, const Sums& sums, bool bitmaps) {
  const int64_t count = sums.set.count(), bytes = count * shape.row_bytes();
  const bool shorter = Keys::width(range) == 4 && bitmap_bytes(range) < keys_bytes(range, count);
  const Form form = count == range ? Form::all : bitmaps && shorter ? Form::bitmap : Form::keys;
  const int64_t keys = keys_bytes(form, range, count);
  Buffer out(padded(kHead + keys + bytes));
  const Head head{count, form};
  std::memcpy(out.data(), &head, kHead);
  std::byte* const at = out.data() + kHead;
  if (form == Form::bitmap) {
    std::fill_n(at, keys, std::byte{});
    sums.set.each([&](int64_t key) { at[key >> 3] |= std::byte{1} << (key & 7); });
  } else if (form == Form::keys) {
    int64_t i = 0;
    const auto list = [&](auto width) {
      sums.set.each([&](int64_t key) {
        const auto entry = static_cast<decltype(width)>(key);
        std::memcpy(at + i++ * static_cast<int64_t>(sizeof width), &entry, sizeof width);
      });
    };
    Keys::width(range) == 8 ? list(uint64_t{}) : list(uint32_t{});
  }
  std::copy_n(sums.values.data(), bytes, at + keys);
  return out;
}

Buffer write_rows(const SparseShape& shape, const SparseRows& rows) {
  Buffer out(message_bytes(shape, shape.rows, rows.count()));
  RowsWriter writer(out.data(), shape, shape.rows, rows.count());
  const std::byte* row = rows.values.data();
  for (int64_t id : rows.ids) {
    writer.put(id, row);
    row += shape.row_bytes();
  }
  return out;
}

RowsMessage read(std::span<const std::byte> message, const SparseShape& shape, int64_t range,
                 int peer) {
  const auto damaged = [&] {
    return FaultError("rank " + std::to_string(peer) + " sent invalid rows (" +
                      std::to_string(message.size()) +
                      " bytes): ranks differ, or the message was " + "damaged on its way");
  };
  Head head{};
  if (std::ssize(message) < kHead) throw damaged();
  std::memcpy(&head, message.data(), kHead);
  if (head.count < 0 || head.count > range) throw damaged();
  if (head.form == Form::bitmap ? Keys::width(range) != 4
      : head.form == Form::all  ? head.count != range
                                : head.form != Form::keys) {
    throw damaged();
  }
  const int64_t keys = keys_bytes(head.form, range, head.count);
  if (std::ssize(message) != padded(kHead + keys + head.count * shape.row_bytes())) throw damaged();
  RowsMessage out;
  const std::byte* const at = message.data() + kHead;
  out.values = at + keys;
  if (head.form == Form::keys) {
    out.keys = Keys(at, head.count, Keys::width(range) == 8);
    for (int64_t i = 0; i < head.count; ++i) {
      if (out.keys[i] < 0 || out.keys[i] >= range) throw damaged();
    }
    return out;
  }
  if (head.form == Form::all) {
    out.listed = Buffer(head.count * 8);
    auto* const all = reinterpret_cast<int64_t*>(out.listed.data());
    std::iota(all, all + head.count, int64_t{0});
    out.keys = Keys(out.listed.data(), head.count, true);
    return out;
  }
  out.listed = Buffer(head.count * 4);
  auto* const listed = reinterpret_cast<uint32_t*>(out.listed.data());
  int64_t found = 0;
  for (int64_t w = 0; w < keys / 8; ++w) {
    uint64_t word;
    std::memcpy(&word, at + 8 * w, 8);
    if (found + ones(word) > head.count) throw damaged();
    for (; word != 0; word &= word - 1) {
      listed[found++] = static_cast<uint32_t>(64 * w + std::countr_zero(word));
    }
  }
  if (found != head.count || (found > 0 && listed[found - 1] >= range)) throw damaged();
  out.keys = Keys(out.listed.data(), found, false);
  return out;
}

namespace {

/// The keys of all, and room for their rows.
Sums united(const SparseShape& shape, int64_t range, std::span<const RowsMessage> messages) {
  std::vector<Keys> lists;
  for (const RowsMessage& message : messages) lists.push_back(message.keys);
  Sums out{RowSet(range, lists), {}};
  out.values = Buffer(out.set.count() * shape.row_bytes());
  return out;
}

}  // namespace

Sums add_up(const SparseShape& shape, int64_t range, std::span<const RowsMessage> messages) {
  Sums out = united(shape, range, messages);
  std::fill_n(out.values.data(), out.values.size(), std::byte{});
  with_type(shape.dtype, [&]<typename T>(T) {
    for (const RowsMessage& message : messages) {
      add_rows(shape, out.set, message, reinterpret_cast<T*>(out.values.data()));
    }
  });
  return out;
}

Sums put_together(const SparseShape& shape, int64_t range, std::span<const RowsMessage> messages) {
  Sums out = united(shape, range, messages);
  const auto row_bytes = static_cast<size_t>(shape.row_bytes());
  for (const RowsMessage& message : messages) {
    const std::byte* row = message.values;
    for (int64_t i = 0; i < message.count(); ++i, row += row_bytes) {
      const auto place = static_cast<size_t>(out.set.position(message.keys[i]));
      std::memcpy(out.values.data() + place * row_bytes, row, row_bytes);
    }
  }
  return out;
}

Sums filled(const SparseShape& shape, const Sums& sums) {
  std::vector<int64_t> all(static_cast<size_t>(shape.rows));
  std::iota(all.begin(), all.end(), int64_t{0});
  const Keys keys{std::span<const int64_t>(all)};
  Sums out{RowSet(shape.rows, std::span(&keys, 1)), Buffer(shape.rows * shape.row_bytes())};
  std::fill_n(out.values.data(), out.values.size(), std::byte{});
  const std::byte* row = sums.values.data();
  sums.set.each([&](int64_t key) {
    std::copy_n(row, shape.row_bytes(), out.values.data() + key * shape.row_bytes());
    row += shape.row_bytes();
  });
  return out;
}

SparseRows without_zeros(const SparseShape& shape, SparseRows rows) {
  const int64_t row_bytes = shape.row_bytes();
  std::byte* const values = rows.values.data();
  size_t kept = 0;
  with_type(shape.dtype, [&]<typename T>(T) {
    const auto is_zero = [](T value) {
      if constexpr (std::is_arithmetic_v<T>) {
        return value == 0;
      } else {
        return to_float(value) == 0;
      }
    };
    for (size_t i = 0; i < rows.ids.size(); ++i) {
      const std::byte* const row = values + static_cast<int64_t>(i) * row_bytes;
      const T* const first = reinterpret_cast<const T*>(row);
      if (std::all_of(first, first + shape.width, is_zero)) continue;
      rows.ids[kept] = rows.ids[i];
      if (kept != i) std::copy_n(row, row_bytes, values + static_cast<int64_t>(kept) * row_bytes);
      ++kept;
    }
  });
  rows.ids.resize(kept);
  SparseRows out{std::move(rows.ids), Buffer(static_cast<int64_t>(kept) * row_bytes)};
  std::copy_n(values, out.values.size(), out.values.data());
  return out;
}

SparseRows recut(const SparseShape& from, const SparseRows& rows, const SparseShape& to) {
  // The line of `to` may be longer by what fills its last row, where nothing is.
  const int64_t end = std::min(from.rows * from.width, to.rows * to.width);
  SparseRows out;
  for (int64_t id : rows.ids) {
    const int64_t first = id * from.width / to.width;
    const int64_t last = (std::min((id + 1) * from.width, end) - 1) / to.width;
    for (int64_t row = first; row <= last; ++row) {
      if (out.ids.empty() || out.ids.back() < row) out.ids.push_back(row);
    }
  }
  out.values = Buffer(out.count() * to.row_bytes());
  std::fill_n(out.values.data(), out.values.size(), std::byte{});
  const int64_t width = itemsize(from.dtype);
  const std::byte* source = rows.values.data();
  size_t place = 0;
  for (int64_t id : rows.ids) {
    const int64_t stop = std::min((id + 1) * from.width, end);
    for (int64_t at = id * from.width; at < stop;) {
      const int64_t row = at / to.width, next = std::min(stop, (row + 1) * to.width);
      while (out.ids[place] < row) ++place;
      const int64_t into = static_cast<int64_t>(place) * to.width + at - row * to.width;
      std::copy_n(source + (at - id * from.width) * width, (next - at) * width,
                  out.values.data() + into * width);
      at = next;
    }
    source += from.row_bytes();
  }
  return out;
}

void add(DType dtype, std::span<std::byte> into, std::span<const std::byte> from) {
  with_type(dtype, [&]<typename T>(T) {
    T* const to = reinterpret_cast<T*>(into.data());
    const T* const with = reinterpret_cast<const T*>(from.data());
    const size_t count = into.size() / sizeof(T);
    for (size_t i = 0; i < count; ++i) to[i] = sum(to[i], with[i]);
  });
}

void scale(const SparseShape& shape, Buffer& values, double factor) {
  if (factor == 1) return;
  if (!is_floating(shape.dtype)) {
    throw UsageError("sums of " + std::string(name(shape.dtype)) + " cannot be scaled");
  }
  with_type(shape.dtype, [&]<typename T>(T) {
    T* const begin = reinterpret_cast<T*>(values.data());
    T* const end = begin + values.size() / static_cast<int64_t>(sizeof(T));
    for (T* at = begin; at < end; ++at) {
      if constexpr (std::is_arithmetic_v<T>) {
        *at = static_cast<T>(*at * static_cast<T>(factor));
      } else {
        *at = from_float<T>(to_float(*at) * static_cast<float>(factor));
      }
    }
  });
}

SparseRows rows_of(Sums sums) {
  SparseRows out;
  out.ids.reserve(static_cast<size_t>(sums.set.count()));
  sums.set.each([&](int64_t key) { out.ids.push_back(key); });
  out.values = std::move(sums.values);
  return out;
}

Sums sums_of(const SparseShape& shape, SparseRows rows) {
  const Keys keys{std::span<const int64_t>(rows.ids)};
  return {RowSet(shape.rows, std::span(&keys, 1)), std::move(rows.values)};
}

}  // namespace usbyte::sparse
