// SPDX-License-Identifier: Apache-2.0
#include "nccl_library.h"

#include <dlfcn.h>
#include <link.h>

#include <cstring>
#include <filesystem>
#include <mutex>
#include <set>
#include <utility>

#include "cuda/current_device.h"
#include "nccl_declarations.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

constexpr const char* kSoname = "libnccl.so.2";

// A handle of dlopen. Never closed: NCCL has threads of its own, which run its code.
struct Opened {
  void* library = nullptr;
  std::string error;  // why `library` is null
};

Opened open_file(const std::string& file, int flags = 0) {
  void* const library = dlopen(file.c_str(), RTLD_LAZY | RTLD_LOCAL | flags);
  if (library) return {library, ""};
  const char* error = dlerror();
  return {nullptr, error ? error : "not loaded"};
}

std::string file_of(const void* function) {
  Dl_info info{};
  return dladdr(function, &info) != 0 && info.dli_fname ? info.dli_fname : kSoname;
}

class NcclLibrary final : public NcclApi {
 public:
  explicit NcclLibrary(void* library) : library_(library) {
    int (*get_version)(int* version) = nullptr;
    find("ncclGetVersion", get_version);
    path_ = file_of(reinterpret_cast<const void*>(get_version));
    if (get_version(&version_) != 0 || version_ < kNcclMinimum) {
      throw UsageError(path_ + " is NCCL " + nccl_version_text(version_) + ", but " +
                       nccl_version_text(kNcclMinimum) +
                       " or newer is needed; pip install -U nvidia-nccl-cu12 (or -cu13), or let "
                       "USBYTE_NCCL_LIB be the path of a newer libnccl.so.2");
    }
    find_functions();
  }

  int version() const override { return version_; }
  const std::string& path() const override { return path_; }

  void with_device(int device, const std::function<void()>& calls) override {
    const CurrentDevice current(device);
    calls();
  }

  std::string error_string(NcclResult result) const override {
    return f_.get_error_string(static_cast<int>(result));
  }
  std::string last_error(NcclComm* comm) const override {
    const char* const text = f_.get_last_error(comm);
    return text ? text : "";
  }

  NcclResult unique_id(NcclId* id) override {
    nccl::UniqueId out{};
    const NcclResult result = made(f_.get_unique_id(&out));
    std::memcpy(id->bytes.data(), out.internal, sizeof out.internal);
    return result;
  }
  NcclResult comm_init(NcclComm** comm, int size, const NcclId& id, int rank,
                       const NcclConfig& config) override {
    nccl::UniqueId unique{};
    std::memcpy(unique.internal, id.bytes.data(), sizeof unique.internal);
    nccl::Config taken;
    if (config.min_ctas > 0) taken.min_ctas = config.min_ctas;
    if (config.max_ctas > 0) taken.max_ctas = config.max_ctas;
    if (version_ < kNcclCtaLimits) {
      taken.size = nccl::kOldConfigBytes;
      taken.version = kNcclMinimum;
    }
    return made(f_.comm_init_rank_config(comm, size, unique, rank, &taken));
  }
  NcclResult comm_async_error(NcclComm* comm, NcclResult* state) override {
    int found = 0;
    const NcclResult result = made(f_.comm_get_async_error(comm, &found));
    *state = made(found);
    return result;
  }
  NcclResult comm_finalize(NcclComm* comm) override { return made(f_.comm_finalize(comm)); }
  NcclResult comm_destroy(NcclComm* comm) override { return made(f_.comm_destroy(comm)); }
  NcclResult comm_abort(NcclComm* comm) override { return made(f_.comm_abort(comm)); }

  NcclResult mem_alloc(void** memory, size_t bytes) override {
    return made(f_.mem_alloc(memory, bytes));
  }
  NcclResult mem_free(void* memory) override { return made(f_.mem_free(memory)); }
  NcclResult comm_register(NcclComm* comm, void* memory, size_t bytes, void** handle) override {
    return made(f_.comm_register(comm, memory, bytes, handle));
  }
  NcclResult comm_deregister(NcclComm* comm, void* handle) override {
    return made(f_.comm_deregister(comm, handle));
  }
  NcclResult window_register(NcclComm* comm, void* memory, size_t bytes,
                             NcclWindow** window) override {
    return made(
        f_.comm_window_register(comm, memory, bytes, window, nccl::kWindowCollectiveSymmetric));
  }
  NcclResult window_deregister(NcclComm* comm, NcclWindow* window) override {
    return made(f_.comm_window_deregister(comm, window));
  }

  NcclResult reduction_create(NcclReduction* reduction, const void* scale, DType dtype,
                              NcclComm* comm) override {
    int op = 0;
    const NcclResult result = made(f_.red_op_create_pre_mul_sum(
        &op, const_cast<void*>(scale), nccl::data_type(dtype), nccl::kScalarHostImmediate, comm));
    *reduction = static_cast<NcclReduction>(op);
    return result;
  }
  NcclResult reduction_destroy(NcclReduction reduction, NcclComm* comm) override {
    return made(f_.red_op_destroy(static_cast<int>(reduction), comm));
  }

  NcclResult group_start() override { return made(f_.group_start()); }
  NcclResult group_end() override { return made(f_.group_end()); }
  NcclResult all_reduce(const void* send, void* recv, size_t count, DType dtype,
                        NcclReduction reduction, NcclComm* comm, CudaStream stream) override {
    return made(f_.all_reduce(send, recv, count, nccl::data_type(dtype),
                              static_cast<int>(reduction), comm, native(stream)));
  }
  NcclResult reduce(const void* send, void* recv, size_t count, DType dtype,
                    NcclReduction reduction, int root, NcclComm* comm, CudaStream stream) override {
    return made(f_.reduce(send, recv, count, nccl::data_type(dtype), static_cast<int>(reduction),
                          root, comm, native(stream)));
  }
  NcclResult reduce_scatter(const void* send, void* recv, size_t count, DType dtype,
                            NcclReduction reduction, NcclComm* comm, CudaStream stream) override {
    return made(f_.reduce_scatter(send, recv, count, nccl::data_type(dtype),
                                  static_cast<int>(reduction), comm, native(stream)));
  }
  NcclResult all_gather(const void* send, void* recv, size_t count, DType dtype, NcclComm* comm,
                        CudaStream stream) override {
    return made(f_.all_gather(send, recv, count, nccl::data_type(dtype), comm, native(stream)));
  }
  NcclResult broadcast(const void* send, void* recv, size_t count, DType dtype, int root,
                       NcclComm* comm, CudaStream stream) override {
    return made(
        f_.broadcast(send, recv, count, nccl::data_type(dtype), root, comm, native(stream)));
  }
  NcclResult send(const void* memory, size_t count, DType dtype, int peer, NcclComm* comm,
                  CudaStream stream) override {
    return made(f_.send(memory, count, nccl::data_type(dtype), peer, comm, native(stream)));
  }
  NcclResult recv(void* memory, size_t count, DType dtype, int peer, NcclComm* comm,
                  CudaStream stream) override {
    return made(f_.recv(memory, count, nccl::data_type(dtype), peer, comm, native(stream)));
  }

 private:
  static NcclResult made(int result) { return static_cast<NcclResult>(result); }
  static nccl::Stream native(CudaStream stream) {
    return reinterpret_cast<nccl::Stream>(stream.handle);
  }

  template <typename Function>
  void find(const char* name, Function*& function, int since = kNcclMinimum) {
    if (version_ != 0 && version_ < since) return;
    function = reinterpret_cast<Function*>(dlsym(library_, name));
    if (function) return;
    throw UsageError((path_.empty() ? std::string("what was opened as NCCL") : path_) +
                     " has no function " + name +
                     "; it is not NCCL or is damaged: reinstall nvidia-nccl-cu12 (or -cu13), or "
                     "let USBYTE_NCCL_LIB be the path of another libnccl.so.2");
  }

  void find_functions() {
    find("ncclGetErrorString", f_.get_error_string);
    find("ncclGetLastError", f_.get_last_error);
    find("ncclGetUniqueId", f_.get_unique_id);
    find("ncclCommInitRankConfig", f_.comm_init_rank_config);
    find("ncclCommGetAsyncError", f_.comm_get_async_error);
    find("ncclCommFinalize", f_.comm_finalize);
    find("ncclCommDestroy", f_.comm_destroy);
    find("ncclCommAbort", f_.comm_abort);
    find("ncclMemAlloc", f_.mem_alloc, kNcclMemory);
    find("ncclMemFree", f_.mem_free, kNcclMemory);
    find("ncclCommRegister", f_.comm_register, kNcclMemory);
    find("ncclCommDeregister", f_.comm_deregister, kNcclMemory);
    find("ncclCommWindowRegister", f_.comm_window_register, kNcclWindows);
    find("ncclCommWindowDeregister", f_.comm_window_deregister, kNcclWindows);
    find("ncclRedOpCreatePreMulSum", f_.red_op_create_pre_mul_sum);
    find("ncclRedOpDestroy", f_.red_op_destroy);
    find("ncclGroupStart", f_.group_start);
    find("ncclGroupEnd", f_.group_end);
    find("ncclAllReduce", f_.all_reduce);
    find("ncclReduce", f_.reduce);
    find("ncclReduceScatter", f_.reduce_scatter);
    find("ncclAllGather", f_.all_gather);
    find("ncclBroadcast", f_.broadcast);
    find("ncclSend", f_.send);
    find("ncclRecv", f_.recv);
  }

  void* const library_;
  int version_ = 0;
  std::string path_;
  nccl::Functions f_;
};

bool same_file(const std::string& a, const std::string& b) {
  std::error_code error;
  return std::filesystem::equivalent(a, b, error);
}

}  // namespace

std::string nccl_version_text(int version) {
  const int base = version >= 10000 ? 10000 : 1000;  // of versions before 2.9
  return std::to_string(version / base) + "." + std::to_string(version % base / 100) + "." +
         std::to_string(version % 100);
}

std::shared_ptr<NcclApi> open_nccl(const std::string& library,
                                   const std::vector<std::string>& candidates) {
  if (!library.empty()) {
    const Opened opened = open_file(library);
    if (opened.library) return std::make_shared<NcclLibrary>(opened.library);
    throw UsageError("NCCL cannot be opened: " + opened.error +
                     "; let USBYTE_NCCL_LIB be the path of a libnccl.so.2, or unset it");
  }
  // Of a soname, this finds what is in the process under it, wherever its file is.
  Opened opened = open_file(kSoname, RTLD_NOLOAD);
  std::string errors;
  std::vector<std::string> files = candidates;
  files.push_back(kSoname);
  for (size_t i = 0; !opened.library && i < files.size(); ++i) {
    opened = open_file(files[i]);
    if (!opened.library) errors += "\n  " + opened.error;
  }
  if (opened.library) return std::make_shared<NcclLibrary>(opened.library);
  throw UsageError(
      "no NCCL found; pip install nvidia-nccl-cu12 (or -cu13, as CUDA's version), or let "
      "USBYTE_NCCL_LIB be the path of a libnccl.so.2. Tried:" +
      errors);
}

std::shared_ptr<NcclApi> load_nccl(const std::string& library,
                                   const std::vector<std::string>& candidates) {
  static std::mutex mutex;  // guards the two below
  static std::shared_ptr<NcclApi> kept;
  static std::string asked;  // for `kept`
  std::lock_guard lock(mutex);
  if (!kept) {
    kept = open_nccl(library, candidates);
    asked = library;
  }
  if (!library.empty() && library != asked && !same_file(library, kept->path())) {
    throw UsageError("this process uses NCCL from " + kept->path() + ", which cannot become " +
                     library + "; set USBYTE_NCCL_LIB before the first use of NCCL");
  }
  return kept;
}

std::vector<std::string> mapped_nccl_copies() {
  std::set<std::string> files;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* out) {
        const std::string file = info->dlpi_name ? info->dlpi_name : "";
        if (std::filesystem::path(file).filename().string().starts_with("libnccl.so")) {
          static_cast<std::set<std::string>*>(out)->insert(file);
        }
        return 0;
      },
      &files);
  return {files.begin(), files.end()};
}

}  // namespace usbyte
