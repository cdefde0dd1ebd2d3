// A library that looks like NCCL to a loader and does nothing. FAKE_NCCL_VERSION is its version,
// FAKE_NCCL_INCOMPLETE leaves a function out.
#include <stddef.h>

#define NOTHING(name) \
  int name(void);     \
  int name(void) { return 0; }

int ncclGetVersion(int* version);
int ncclGetVersion(int* version) {
  *version = FAKE_NCCL_VERSION;
  return 0;
}

const char* ncclGetErrorString(int result);
const char* ncclGetErrorString(int result) { return result == 7 ? "in progress" : "other"; }

const char* ncclGetLastError(const void* comm);
const char* ncclGetLastError(const void* comm) { return comm ? "a communicator's" : NULL; }

int ncclGetUniqueId(char* id);
int ncclGetUniqueId(char* id) {
  for (int i = 0; i < 128; ++i) id[i] = (char)i;
  return 0;
}

// As nccl.h has it up to 2.17.
struct config {
  size_t size;
  unsigned magic, version;
  int blocking, cga, min_ctas, max_ctas;
};
struct id {
  char internal[128];
};

// The communicator tells what it was made with, by ncclCommGetAsyncError.
int ncclCommInitRankConfig(void** comm, int size, struct id id, int rank, struct config* config);
int ncclCommInitRankConfig(void** comm, int size, struct id id, int rank, struct config* config) {
  static int told;
  const int limits = config->size < 32 ? 0
                                       : (config->min_ctas > 0) +
                                             2 * (config->max_ctas > 0 ? config->max_ctas : 0);
  told = (int)config->size + 100 * (int)(config->version / 100) + 10000000 * limits;
  if (config->magic != 0xcafebeefU || config->blocking != 0) return 4;
  if (size != 3 || rank != 2 || id.internal[5] != 5) return 4;
  *comm = &told;
  return 7;
}
int ncclCommGetAsyncError(void* comm, int* state);
int ncclCommGetAsyncError(void* comm, int* state) {
  *state = *(int*)comm;
  return 0;
}

NOTHING(ncclCommFinalize)
NOTHING(ncclCommDestroy)
NOTHING(ncclCommAbort)
#if FAKE_NCCL_VERSION >= 21900
NOTHING(ncclMemAlloc)
NOTHING(ncclMemFree)
NOTHING(ncclCommRegister)
NOTHING(ncclCommDeregister)
#endif
#if FAKE_NCCL_VERSION >= 22700
NOTHING(ncclCommWindowRegister)
#ifndef FAKE_NCCL_INCOMPLETE
NOTHING(ncclCommWindowDeregister)
#endif
#endif
NOTHING(ncclRedOpCreatePreMulSum)
NOTHING(ncclRedOpDestroy)
NOTHING(ncclGroupStart)
NOTHING(ncclGroupEnd)
NOTHING(ncclAllReduce)
NOTHING(ncclReduce)
NOTHING(ncclReduceScatter)
NOTHING(ncclAllGather)
NOTHING(ncclBroadcast)
NOTHING(ncclSend)
NOTHING(ncclRecv)
