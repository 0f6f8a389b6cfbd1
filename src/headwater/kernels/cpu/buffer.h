// Memory that a thread keeps from call to call.
#pragma once

#include <cstddef>
#include <new>

namespace hw {

// Room for elements, on a cache line; it grows and stays, and where it grows its contents are lost.
template <class E> class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  ~Buffer() { if (data) ::operator delete(data, std::align_val_t(64)); }

  E* of(size_t n) {
    if (n > size) {
      if (data) ::operator delete(data, std::align_val_t(64));
      data = nullptr, size = 0;
      data = (E*)::operator new(n * sizeof(E), std::align_val_t(64));
      size = n;
    }
    return data;
  }

 private:
  E* data = nullptr;
  size_t size = 0;
};

}  // namespace hw
