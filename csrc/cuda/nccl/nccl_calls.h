// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "nccl_comms.h"
#include "usbyte/communicator.h"

namespace usbyte {

/// Where NCCL puts a request, and for whom.
struct NcclTarget {
  NcclApi& nccl;
  const NcclComms& comms;
  NcclComm* comm;
  CudaStream stream;
  int rank;
  int size;
};

/// What keeps NCCL from carrying out `request` among `size` ranks; empty if nothing does.
std::string nccl_problem(const Request& request, int size);

/// Calls NCCL for all of `request`, in one group; throws FaultError. `send` of an all_to_all is not
/// in its memory of `recv`; the rank's own chunk stays where it is.
void call_nccl(const NcclTarget& target, const Request& request);

}  // namespace usbyte
