// SPDX-License-Identifier: Apache-2.0
#include "message_layout.h"

#include "plan/dimension_path.h"

namespace usbyte {
namespace {

Collective travels_by(Collective kind, const Codec& codec) {
  if (kind == Collective::reduce_scatter) return Collective::all_to_all;
  return kind == Collective::all_reduce && codec.adds() ? kind : Collective::all_gather;
}

}  // namespace

CodedShare::CodedShare(const Op& planned, const Topology* mesh, int of, int among)
    : op(planned), rank(of), size(among), drawer(of) {
  if (op.dimension < 0) return;
  op.blocks = worked_on(planned, mesh, of);
  rank = mesh->coordinates(of)[static_cast<size_t>(op.dimension)];
  size = dimension_of(op, *mesh).size;
  // What is scattered, by another chance than what it is added up by afterwards.
  drawer = op.kind == Collective::reduce_scatter ? among + of : rank;
}

MessageLayout::MessageLayout(const CodedShare& part, const Codec& codec)
    : kind(travels_by(part.op.kind, codec)),
      dtype(part.op.kind == Collective::all_reduce ? codec.message_dtype() : DType::uint8),
      ranks(part.op.kind == Collective::all_gather || kind == Collective::all_reduce ? 1
                                                                                     : part.size),
      salt(part.op.kind == Collective::all_gather ? 1 : 0) {
  const Op& op = part.op;
  const int rank = part.rank, size = part.size;
  const bool in_parts = op.kind != Collective::all_reduce;
  std::vector<int64_t> places;
  for (Block b : op.blocks) {
    places.push_back(chunk);
    chunk += codec.message_bytes((in_parts ? shard(b, 0, size) : b).numel());
  }
  bytes = kind == Collective::all_reduce ? chunk : size * chunk;
  for (size_t i = 0; i < op.blocks.size(); ++i) {
    const Block b = op.blocks[i], own = shard(b, rank, size);
    const auto place = [&](int of) { return of * chunk + places[i]; };
    if (op.kind == Collective::reduce_scatter) {
      for (int r = 0; r < size; ++r) sent.push_back({shard(b, r, size), place(r)});
      received.push_back({own, places[i]});
    } else if (op.kind == Collective::all_gather) {
      sent.push_back({own, place(rank)});
      for (int r = 0; r < size; ++r) received.push_back({shard(b, r, size), place(r)});
    } else {
      sent.push_back({b, place(kind == Collective::all_reduce ? 0 : rank)});
      received.push_back({b, places[i]});
    }
  }
}

}  // namespace usbyte
