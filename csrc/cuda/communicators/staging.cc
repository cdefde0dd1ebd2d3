// SPDX-License-Identifier: Apache-2.0
#include "staging.h"

#include <algorithm>
#include <cstddef>
#include <string>

namespace usbyte {
namespace {

bool has_shards(Collective kind) {
  return kind == Collective::reduce_scatter || kind == Collective::all_gather ||
         kind == Collective::all_to_all;
}

// A sub-range of every row of a span. A row is a rank's shard, or the whole span.
struct RowRange {
  size_t span;
  int64_t begin, end;  // elements from the row's begin
};

// Copies that go on where the one before them ends, on both sides, become part of it.
void append(std::vector<StagedCopy>& copies, StagedCopy next) {
  if (next.bytes == 0) return;
  if (!copies.empty()) {
    StagedCopy& last = copies.back();
    if (static_cast<std::byte*>(last.device) + last.bytes == next.device &&
        last.offset + last.bytes == next.offset) {
      last.bytes += next.bytes;
      return;
    }
  }
  copies.push_back(next);
}

class Staging {
 public:
  Staging(const Request& request, int rank, int size)
      : request_(request),
        rank_(rank),
        rows_(has_shards(request.kind) ? size : 1),
        width_(itemsize(request.dtype)) {}

  std::vector<StagedChunk> cut(int64_t buffer_bytes) const {
    const int64_t most = buffer_bytes / (rows_ * width_);  // elements of a row in one message
    std::vector<StagedChunk> chunks;
    std::vector<RowRange> pieces;
    int64_t room = most;
    const auto close = [&] {
      if (!pieces.empty()) chunks.push_back(chunk(pieces, most - room));
      pieces.clear();
      room = most;
    };
    for (size_t s = 0; s < request_.recv.size(); ++s) {
      const int64_t length = row_length(s);
      for (int64_t begin = 0; begin < length;) {
        const int64_t end = std::min(begin + room, length);
        pieces.push_back({s, begin, end});
        room -= end - begin;
        begin = end;
        if (room == 0) close();
      }
    }
    close();
    if (chunks.empty()) chunks.emplace_back();
    return chunks;
  }

 private:
  int64_t row_length(size_t span) const { return (request_.recv[span].count + rows_ - 1) / rows_; }

  bool sends(int row) const {
    if (request_.kind == Collective::broadcast) return rank_ == request_.root;
    return request_.kind != Collective::all_gather || row == rank_;
  }
  bool receives(int row) const {
    if (request_.kind == Collective::broadcast) return rank_ != request_.root;
    if (request_.kind == Collective::all_gather) return row != rank_;
    return request_.kind != Collective::reduce_scatter || row == rank_;
  }

  StagedChunk chunk(const std::vector<RowRange>& pieces, int64_t row_elements) const {
    StagedChunk out{rows_ * row_elements, {}, {}};
    const std::vector<BufferView>& sent =
        request_.kind == Collective::all_to_all ? request_.send : request_.recv;
    for (int row = 0; row < rows_; ++row) {
      int64_t offset = row * row_elements * width_;
      for (const RowRange& piece : pieces) {
        if (sends(row)) append(out.out, copy(sent[piece.span], piece, row, offset));
        if (receives(row)) append(out.in, copy(request_.recv[piece.span], piece, row, offset));
        offset += (piece.end - piece.begin) * width_;
      }
    }
    return out;
  }

  StagedCopy copy(const BufferView& span, const RowRange& piece, int row, int64_t offset) const {
    const Block shard_of_row = shard({0, span.count}, row, rows_);
    const int64_t begin = std::min(shard_of_row.begin + piece.begin, shard_of_row.end);
    const int64_t end = std::min(shard_of_row.begin + piece.end, shard_of_row.end);
    return {static_cast<std::byte*>(span.data) + begin * width_, offset, (end - begin) * width_};
  }

  const Request& request_;
  const int rank_;
  const int rows_;
  const int64_t width_;
};

}  // namespace

std::string staging_problem(const Request& request, int size) {
  const std::string kind(name(request.kind));
  if (request.kind == Collective::barrier) return "";
  if (request.kind == Collective::sparse_all_reduce) return kNotARequest;
  if (request.scale != 1) return kind + ": the staged communicator does not scale; do so first";
  if (request.kind == Collective::broadcast && (request.root < 0 || request.root >= size)) {
    return kind + ": root " + std::to_string(request.root) + " is not one of the " +
           std::to_string(size) + " ranks";
  }
  if (request.kind == Collective::all_to_all &&
      (request.send.size() != 1 || request.recv.size() != 1 ||
       request.send[0].count != request.recv[0].count || request.recv[0].count % size != 0)) {
    return kind + ": needs one send and one recv span of equal counts, a multiple of the " +
           std::to_string(size) + " ranks";
  }
  for (const auto* spans : {&request.send, &request.recv}) {
    for (const BufferView& span : *spans) {
      if (span.count < 0)
        return kind + ": the count " + std::to_string(span.count) + " is negative";
      if (span.count > 0 && !span.data) {
        return kind + ": a span of " + std::to_string(span.count) + " elements has no memory";
      }
    }
  }
  return "";
}

std::vector<StagedChunk> stage(const Request& request, int rank, int size, int64_t buffer_bytes) {
  if (request.kind == Collective::barrier) return {{}};
  return Staging(request, rank, size).cut(buffer_bytes);
}

}  // namespace usbyte
