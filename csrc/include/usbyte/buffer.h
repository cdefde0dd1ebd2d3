#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <span>

namespace usbyte {

/// Memory of its own, not initialised, on 16 bytes at least.
///
/// If large, of huge pages where the system gives them to who asks: it clears and maps fresh memory
/// page by page, and with small pages that takes longer than to fill it with a message.
class Buffer {
 public:
  Buffer() = default;
  /// Throws std::bad_alloc.
  explicit Buffer(int64_t bytes);

  std::byte* data() const { return data_.get(); }
  int64_t size() const { return size_; }  // bytes
  std::span<const std::byte> bytes() const { return {data(), static_cast<size_t>(size_)}; }

 private:
  struct Delete {
    Delete() : Delete(std::align_val_t{16}) {}
    explicit Delete(std::align_val_t a) : alignment(a) {}
    void operator()(std::byte* memory) const { ::operator delete(memory, alignment); }

    std::align_val_t alignment;
  };

  std::unique_ptr<std::byte, Delete> data_;
  int64_t size_ = 0;
};

}  // namespace usbyte
