// SPDX-License-Identifier: Apache-2.0
#include "current_device.h"

#include <dlfcn.h>

#include <map>
#include <mutex>
#include <string>

#include "usbyte/error.h"

namespace usbyte {
namespace {

class Driver {
 public:
  static Driver& get() {
    static Driver driver;
    return driver;
  }

  void push(int device) { check(ctx_push_current_(context(device)), "cuCtxPushCurrent"); }
  void pop() {
    void* context = nullptr;
    ctx_pop_current_(&context);
  }

 private:
  Driver() {
    library_ = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    if (!library_) {
      throw FaultError(std::string("CUDA's driver cannot be opened: ") + dlerror() +
                       "; install the NVIDIA driver");
    }
    find("cuGetErrorString", get_error_string_);
    find("cuDeviceGet", device_get_);
    find("cuDevicePrimaryCtxRetain", primary_ctx_retain_);
    find("cuCtxPushCurrent_v2", ctx_push_current_);
    find("cuCtxPopCurrent_v2", ctx_pop_current_);
    int (*init)(unsigned int) = nullptr;
    find("cuInit", init);
    check(init(0), "cuInit");
  }

  template <typename Function>
  void find(const char* name, Function*& function) {
    function = reinterpret_cast<Function*>(dlsym(library_, name));
    if (!function) {
      throw FaultError(std::string("CUDA's driver has no ") + name + "; update the NVIDIA driver");
    }
  }

  void check(int result, const char* call) const {
    if (result == 0) return;
    const char* text = nullptr;
    get_error_string_(result, &text);
    throw FaultError(std::string(call) + ": " + (text ? text : std::to_string(result).c_str()));
  }

  // Kept for good: it is the context that the CUDA runtime uses too.
  void* context(int device) {
    std::lock_guard lock(mutex_);
    void*& context = contexts_[device];
    if (!context) {
      int handle = 0;
      check(device_get_(&handle, device), "cuDeviceGet");
      check(primary_ctx_retain_(&context, handle), "cuDevicePrimaryCtxRetain");
    }
    return context;
  }

  void* library_;
  int (*get_error_string_)(int result, const char** text);
  int (*device_get_)(int* device, int ordinal);
  int (*primary_ctx_retain_)(void** context, int device);
  int (*ctx_push_current_)(void* context);
  int (*ctx_pop_current_)(void** context);
  std::mutex mutex_;  // guards the contexts
  std::map<int, void*> contexts_;
};

}  // namespace

CurrentDevice::CurrentDevice(int device) { Driver::get().push(device); }
CurrentDevice::~CurrentDevice() { Driver::get().pop(); }

}  // namespace usbyte
