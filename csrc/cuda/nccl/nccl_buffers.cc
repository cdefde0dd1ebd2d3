// SPDX-License-Identifier: Apache-2.0
#include "nccl_buffers.h"

#include <utility>

namespace usbyte {

NcclBuffers::NcclBuffers(std::shared_ptr<NcclApi> nccl, std::shared_ptr<Cuda> cuda,
                         NcclComms& comms, const NcclOptions& options)
    : nccl_(std::move(nccl)), cuda_(std::move(cuda)), comms_(comms), options_(options) {}

void* NcclBuffers::allocate(size_t bytes) {
  if (nccl_->version() < kNcclMemory) return cuda_->allocate(bytes);
  void* memory = nullptr;
  nccl_->with_device(cuda_->device(), [&] {
    comms_.check(nccl_->mem_alloc(&memory, bytes), "ncclMemAlloc", nullptr);
  });
  allocated_.insert(memory);
  return memory;
}

void NcclBuffers::free(void* memory) {
  if (allocated_.erase(memory) == 0) return cuda_->free(memory);
  nccl_->with_device(cuda_->device(),
                     [&] { comms_.check(nccl_->mem_free(memory), "ncclMemFree", nullptr); });
}

void NcclBuffers::enroll(void* memory, size_t bytes) {
  if (nccl_->version() < kNcclMemory) return;
  for (size_t slot = 0; slot < comms_.count(); ++slot) enroll(memory, bytes, slot);
}

void NcclBuffers::enroll(void* memory, size_t bytes, size_t slot) {
  Registration& out = registrations_.emplace_back(Registration{memory, slot});
  // Only what ncclMemAlloc made can be a window; of anything else the attempt is an error.
  if (options_.windows && nccl_->version() >= kNcclWindows && allocated_.contains(memory)) {
    comms_.call(slot, options_.init_timeout_s, [&](NcclComm* comm) {
      comms_.check(nccl_->window_register(comm, memory, bytes, &out.window),
                   "ncclCommWindowRegister", comm);
    });
  }
  if (out.window) return;
  comms_.call(slot, options_.init_timeout_s, [&](NcclComm* comm) {
    comms_.check(nccl_->comm_register(comm, memory, bytes, &out.handle), "ncclCommRegister", comm);
  });
}

void NcclBuffers::remove(void* memory) {
  const bool usable = comms_.failure().empty();
  for (const Registration& r : registrations_) {
    if (r.memory == memory && usable) deregister(r);
  }
  std::erase_if(registrations_, [memory](const Registration& r) { return r.memory == memory; });
}

void NcclBuffers::clear() {
  for (const Registration& r : registrations_) deregister(r);
  registrations_.clear();
}

void NcclBuffers::deregister(const Registration& registration) {
  comms_.call(registration.slot, options_.close_timeout_s, [&](NcclComm* comm) {
    if (registration.window) {
      comms_.check(nccl_->window_deregister(comm, registration.window), "ncclCommWindowDeregister",
                   comm);
    } else if (registration.handle) {
      comms_.check(nccl_->comm_deregister(comm, registration.handle), "ncclCommDeregister", comm);
    }
  });
}

}  // namespace usbyte
