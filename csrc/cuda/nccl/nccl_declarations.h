// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <climits>
#include <cstddef>

#include "cuda/nccl/nccl.h"

// What is used of NCCL's C interface, which is stable: NCCL accepts callers that were compiled for
// older versions. Types and values are those of nccl.h.
namespace usbyte::nccl {

/// The part of ncclConfig_t that 2.17 has. NCCL reads `size` bytes of it and takes its defaults for
/// whatever a library of `version` did not know, so newer versions accept it too.
struct Config {
  size_t size = sizeof(Config);
  unsigned int magic = 0xcafebeef;
  unsigned int version = kNcclCtaLimits;
  int blocking = 0;
  int cga_cluster_size = INT_MIN;  // INT_MIN: not set
  int min_ctas = INT_MIN;
  int max_ctas = INT_MIN;
};
static_assert(sizeof(Config) == 32);

/// Before 2.17 that part ended behind `blocking`; 24 is its size with padding.
constexpr size_t kOldConfigBytes = 24;

struct UniqueId {
  char internal[128];
};
static_assert(sizeof(UniqueId) == sizeof(NcclId));

constexpr int kScalarHostImmediate = 1;
constexpr int kWindowCollectiveSymmetric = 1;

/// An ncclDataType_t.
constexpr int data_type(DType dtype) {
  switch (dtype) {
    case DType::int8:
      return 0;
    case DType::uint8:
      return 1;
    case DType::int32:
      return 2;
    case DType::int64:
      return 4;
    case DType::float16:
      return 6;
    case DType::float32:
      return 7;
    case DType::float64:
      return 8;
    case DType::bfloat16:
      return 9;
  }
  return -1;
}

using Comm = NcclComm*;
using Stream = void*;

/// Pointers to the functions; those that the version lacks are null.
struct Functions {
  const char* (*get_error_string)(int result) = nullptr;
  const char* (*get_last_error)(Comm comm) = nullptr;
  int (*get_unique_id)(UniqueId* id) = nullptr;
  int (*comm_init_rank_config)(Comm* comm, int size, UniqueId id, int rank,
                               Config* config) = nullptr;
  int (*comm_get_async_error)(Comm comm, int* state) = nullptr;
  int (*comm_finalize)(Comm comm) = nullptr;
  int (*comm_destroy)(Comm comm) = nullptr;
  int (*comm_abort)(Comm comm) = nullptr;
  int (*mem_alloc)(void** memory, size_t bytes) = nullptr;
  int (*mem_free)(void* memory) = nullptr;
  int (*comm_register)(Comm comm, void* memory, size_t bytes, void** handle) = nullptr;
  int (*comm_deregister)(Comm comm, void* handle) = nullptr;
  int (*comm_window_register)(Comm comm, void* memory, size_t bytes, NcclWindow** window,
                              int flags) = nullptr;
  int (*comm_window_deregister)(Comm comm, NcclWindow* window) = nullptr;
  int (*red_op_create_pre_mul_sum)(int* op, void* scalar, int dtype, int residence,
                                   Comm comm) = nullptr;
  int (*red_op_destroy)(int op, Comm comm) = nullptr;
  int (*group_start)() = nullptr;
  int (*group_end)() = nullptr;
  int (*all_reduce)(const void* send, void* recv, size_t count, int dtype, int op, Comm comm,
                    Stream stream) = nullptr;
  int (*reduce)(const void* send, void* recv, size_t count, int dtype, int op, int root, Comm comm,
                Stream stream) = nullptr;
  int (*reduce_scatter)(const void* send, void* recv, size_t count, int dtype, int op, Comm comm,
                        Stream stream) = nullptr;
  int (*all_gather)(const void* send, void* recv, size_t count, int dtype, Comm comm,
                    Stream stream) = nullptr;
  int (*broadcast)(const void* send, void* recv, size_t count, int dtype, int root, Comm comm,
                   Stream stream) = nullptr;
  int (*send)(const void* memory, size_t count, int dtype, int peer, Comm comm,
              Stream stream) = nullptr;
  int (*recv)(void* memory, size_t count, int dtype, int peer, Comm comm, Stream stream) = nullptr;
};

}  // namespace usbyte::nccl
