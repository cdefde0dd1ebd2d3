// SPDX-License-Identifier: Apache-2.0
#include "usbyte/exchange.h"

#include <new>
#include <string>

#include "usbyte/error.h"

namespace usbyte {
namespace {

// Rows and picks are parts of one tensor; what is announced beyond that is garbage, and some
// systems give out memory that they do not have.
constexpr int64_t kMostBytes = int64_t{1} << 40;

Buffer room_for(int64_t bytes, int peer) {
  try {
    if (bytes >= 0 && bytes <= kMostBytes) return Buffer(bytes);
  } catch (const std::bad_alloc&) {
  }
  throw FaultError("rank " + std::to_string(peer) + " announced a message of " +
                   std::to_string(bytes) + " bytes, for which there is no memory");
}

}  // namespace

std::vector<Buffer> swap(Exchange& exchange, std::span<const Outgoing> outgoing) {
  const size_t count = outgoing.size();
  std::vector<int64_t> leaving(count), coming(count);
  std::vector<Leg> legs(count);
  for (size_t i = 0; i < count; ++i) {
    leaving[i] = std::ssize(outgoing[i].message);
    legs[i] = {outgoing[i].peer, std::as_bytes(std::span(&leaving[i], 1)),
               std::as_writable_bytes(std::span(&coming[i], 1))};
  }
  exchange.transfer(legs);
  std::vector<Buffer> received;
  for (size_t i = 0; i < count; ++i) {
    const Buffer& room = received.emplace_back(room_for(coming[i], outgoing[i].peer));
    legs[i] = {
        outgoing[i].peer, outgoing[i].message, {room.data(), static_cast<size_t>(room.size())}};
  }
  exchange.transfer(legs);
  return received;
}

}  // namespace usbyte
