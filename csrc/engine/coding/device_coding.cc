// SPDX-License-Identifier: Apache-2.0
#include "device_coding.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "cuda/event_pool.h"
#include "engine/cancellation_token.h"
#include "message_layout.h"

namespace usbyte {
namespace {

// What the coded ops of one engine share: streams, as what is encoded must not wait for what is yet
// to be received; messages on the device; and the host's copies of the flat buffer and, of so many
// rows, the memory.
struct Lanes {
  Lanes(const CodingSpace& space, bool mirrored, int rows)
      : cuda(space.device),
        cancellation(*space.cancellation),
        plan(space.plan),
        flat_buffer(space.flat_buffer),
        codec_state(space.codec_state),
        events(cuda),
        out(cuda, true),
        in(cuda, true),
        copied(events.acquire(EventKind::ordering)),
        mirror(cuda, mirrored ? plan.flat_buffer_bytes() : 0),
        state_mirror(cuda, rows * plan.numel() * itemsize(DType::float32)) {}
  // Ops of a step that was not finished may be on the streams.
  ~Lanes() {
    for (const OwnedStream* stream : {&out, &in}) {
      try {
        cuda->synchronize(stream->get());
      } catch (const FaultError&) {
        // Then nothing runs on the device any more.
      }
    }
    for (std::byte* buffer : buffers) cuda->free(buffer);
  }

  bool quiesce() {
    constexpr double kMost_s = 1;
    try {
      for (const OwnedStream* stream : {&in, &out}) {
        cuda->record(copied.get(), stream->get());
        if (!passes_within(*cuda, copied.get(), kMost_s)) return false;
      }
    } catch (const FaultError&) {
      // Then nothing runs on the device any more.
    }
    return true;
  }

  std::byte* allocate(int64_t bytes) {
    buffers.push_back(nullptr);
    buffers.back() = static_cast<std::byte*>(cuda->allocate(static_cast<size_t>(bytes)));
    return buffers.back();
  }

  void await(CudaStream stream) {
    cuda->record(copied.get(), stream);
    cancellation.await(*cuda, copied.get());
  }

  const std::shared_ptr<Cuda> cuda;
  CancellationToken& cancellation;
  const Plan& plan;
  std::byte* const flat_buffer;
  float* const codec_state;
  EventPool events;
  const OwnedStream out, in;
  const PooledEvent copied;  // for the host, which waits for one thing at a time
  const HostBytes mirror;
  const HostBytes state_mirror;
  std::vector<std::byte*> buffers;
};

class DeviceOp : public CodedOp {
 public:
  void encode(const CodingContext& context) final {
    for (CudaEvent event : context.order->after) cuda().wait(out(), event);
    encode_behind(context);
    cuda().record(encoded_.get(), out());
    request_.order = context.order;
    request_.order->after = {encoded_.get()};
  }
  void decode(const CodingContext& context) final {
    cuda().wait(in(), context.order->done);
    decode_behind(context);
    cuda().record(context.done, in());
  }
  bool quiesce() final {
    // After a fault nothing waits for the network, which may still write to the message.
    try {
      if (request_.order) cuda().wait(in(), request_.order->done);
    } catch (const FaultError&) {
      // Then nothing runs on the device any more.
    }
    return lanes_->quiesce();
  }

 protected:
  DeviceOp(std::shared_ptr<Lanes> lanes, const Op& op, Collective kind, DType dtype, int64_t bytes)
      : CodedOp(op, kind, dtype),
        lanes_(std::move(lanes)),
        encoded_(lanes_->events.acquire(EventKind::ordering)),
        buffer_(lanes_->allocate(bytes)) {
    travels(buffer_, bytes);
  }

  // On `out` and on `in`.
  virtual void encode_behind(const CodingContext& context) = 0;
  virtual void decode_behind(const CodingContext& context) = 0;

  Cuda& cuda() const { return *lanes_->cuda; }
  CudaStream out() const { return lanes_->out.get(); }
  CudaStream in() const { return lanes_->in.get(); }
  std::byte* buffer() const { return buffer_; }

  const std::shared_ptr<Lanes> lanes_;

 private:
  const PooledEvent encoded_;
  std::byte* const buffer_;
};

// A cast that the network adds up.
class CastOp final : public DeviceOp {
 public:
  CastOp(std::shared_ptr<Lanes> lanes, const CodedShare& part, DType from, DType message)
      : DeviceOp(std::move(lanes), part.op, Collective::all_reduce, message,
                 elements(part.op) * itemsize(message)),
        dtype_(from),
        message_(message) {
    std::byte* at = buffer();
    for (Block b : part.op.blocks) {
      std::byte* const values = lanes_->flat_buffer + lanes_->plan.byte_offset(b.begin);
      casts_.push_back({values, at, b.numel()});
      back_.push_back({at, values, b.numel()});
      at += b.numel() * itemsize(message);
    }
    reads_ = writes_ = part.op.blocks;
  }

 private:
  static int64_t elements(const Op& op) {
    int64_t out = 0;
    for (Block b : op.blocks) out += b.numel();
    return out;
  }
  void encode_behind(const CodingContext&) override {
    cuda().copy_segments(casts_, dtype_, message_, 1, out());
  }
  void decode_behind(const CodingContext&) override {
    cuda().copy_segments(back_, message_, dtype_, 1, in());
  }

  const DType dtype_, message_;
  std::vector<CopySegment> casts_, back_;
};

// A codec whose groups kernels encode and decode, or a cast in parts.
class GroupsOp final : public DeviceOp {
 public:
  GroupsOp(std::shared_ptr<Lanes> lanes, const CodedShare& part, DType from, const Codec& codec,
           MessageLayout layout, uint64_t seed)
      : DeviceOp(std::move(lanes), part.op, layout.kind, layout.dtype, layout.bytes),
        kernels_(*codec.kernels()),
        layout_(std::move(layout)),
        dtype_(from),
        drawer_(part.drawer),
        seed_(seed + layout_.salt) {
    for (const auto& [block, at] : layout_.sent) {
      float* const kept = codec.state_rows() > 0 ? lanes_->codec_state + block.begin : nullptr;
      encodings_.push_back({values(block), kept, buffer() + at, block.numel(), 0});
      reads_.push_back(block);
    }
    for (const auto& [block, at] : layout_.received) {
      decodings_.push_back({values(block), buffer() + at, block.numel()});
      writes_.push_back(block);
    }
  }

 private:
  std::byte* values(Block b) const {
    return b.numel() == 0 ? nullptr : lanes_->flat_buffer + lanes_->plan.byte_offset(b.begin);
  }

  void encode_behind(const CodingContext& context) override {
    for (size_t i = 0; i < encodings_.size(); ++i) {
      encodings_[i].key = RngKey::of(seed_, context.step, layout_.sent[i].block.begin, drawer_).own;
    }
    cuda().encode_groups(kernels_, encodings_, dtype_, out());
  }
  void decode_behind(const CodingContext&) override {
    cuda().decode_groups(kernels_, decodings_, dtype_, layout_.ranks, layout_.chunk, in());
  }

  const GroupCodec kernels_;
  const MessageLayout layout_;
  const DType dtype_;
  const int drawer_;
  const uint64_t seed_;
  std::vector<GroupEncoding> encodings_;
  std::vector<GroupDecoding> decodings_;
};

// What the host codes. Its message is copied to the device for the network, as a communicator has
// one kind of memory only.
class HostedOp final : public DeviceOp {
 public:
  HostedOp(std::shared_ptr<Lanes> lanes, const CodedShare& part, const Codec& codec,
           std::unique_ptr<CodedOp> host)
      : DeviceOp(std::move(lanes), part.op, host->request().kind, host->request().dtype,
                 bytes_of(*host)),
        host_(std::move(host)),
        summed_(!part.op.scheme.empty()),
        sends_(request_.kind == Collective::all_gather
                   ? shard({0, bytes_of(*host_)}, part.rank, part.size)
                   : Block{0, bytes_of(*host_)}),
        rows_(codec.state_rows()),
        rounds_(!codec.matrices() || part.op.kind == Collective::all_reduce ? Rounds::none
                : part.op.kind == Collective::all_gather                    ? Rounds::second
                                                                            : Rounds::first) {
    reads_ = host_->reads();
    writes_ = host_->writes();
  }

  RowsView rows() const override { return host_->rows(); }
  void sum(SparseRows rows) override {
    host_->sum(std::move(rows));
    // No communicator waits for the stream of the message here. The codec state is copied on that
    // stream, and must be on the device before the op is done.
    for (CudaEvent encoded : request_.order->after) cuda().wait(in(), encoded);
    cuda().record(request_.order->done, in());
  }

 private:
  static int64_t bytes_of(const CodedOp& op) {
    return op.request().recv.front().count * itemsize(op.request().dtype);
  }
  std::byte* message() const { return static_cast<std::byte*>(host_->request().recv.front().data); }

  void encode_behind(const CodingContext& context) override {
    for (Block b : reads_) copy(b, lanes_->mirror.data(), lanes_->flat_buffer, out());
    if (rounds_ != Rounds::second) copy_state(mirrored(), lanes_->codec_state, out());
    lanes_->await(out());
    host_->encode(context);
    if (rounds_ == Rounds::none) copy_state(lanes_->codec_state, mirrored(), out());
    if (sends_.numel() > 0) {
      cuda().copy(buffer() + sends_.begin, message() + sends_.begin,
                  static_cast<size_t>(sends_.numel()), out());
    }
    if (summed_) cuda().record(context.order->started, out());
  }
  void decode_behind(const CodingContext& context) override {
    if (bytes_of(*host_) > 0) {
      cuda().copy(message(), buffer(), static_cast<size_t>(bytes_of(*host_)), in());
    }
    lanes_->await(in());
    host_->decode(context);
    for (Block b : writes_) copy(b, lanes_->flat_buffer, lanes_->mirror.data(), in());
    if (rounds_ == Rounds::second) copy_state(lanes_->codec_state, mirrored(), in());
  }
  float* mirrored() const { return reinterpret_cast<float*>(lanes_->state_mirror.data()); }
  void copy_state(float* to, const float* from, CudaStream stream) const {
    for (Block b : host_->keeps()) {
      for (int64_t row = 0; row < rows_; ++row) {
        const int64_t at = row * lanes_->plan.numel() + b.begin;
        cuda().copy(to + at, from + at, static_cast<size_t>(b.numel()) * sizeof(float), stream);
      }
    }
  }
  void copy(Block b, std::byte* to, const std::byte* from, CudaStream stream) const {
    if (b.numel() == 0) return;
    const int64_t at = lanes_->plan.byte_offset(b.begin);
    const int64_t bytes = b.numel() * itemsize(lanes_->plan.dtype(b));
    cuda().copy(to + at, from + at, static_cast<size_t>(bytes), stream);
  }

  const std::unique_ptr<CodedOp> host_;
  const bool summed_;  // with no communicator to record events
  const Block sends_;  // bytes of the message
  const int rows_;
  // Of a codec of two rounds: in between, what it keeps is on the host.
  const enum class Rounds { none, first, second } rounds_;
};

bool is_cast(const Plan& plan, const Op& op, const Codec& codec) {
  const DType to = codec.message_dtype(), from = plan.dtype(op.blocks.front());
  return op.kind == Collective::all_reduce && codec.adds() && codec.state_rows() == 0 &&
         (to == DType::float16 || to == DType::bfloat16) && from != DType::float64;
}

bool in_groups(const Plan& plan, const Op& op, const Codec& codec) {
  return codec.kernels() && plan.dtype(op.blocks.front()) != DType::float64;
}

}  // namespace

HostBytes::HostBytes(const std::shared_ptr<Cuda>& device, int64_t bytes) : size_(bytes) {
  const auto count = static_cast<size_t>(bytes);
  if (device) {
    data_ = std::shared_ptr<std::byte>(static_cast<std::byte*>(device->allocate_pinned(count)),
                                       [device](std::byte* p) { device->free_pinned(p); });
    if (bytes > 0) std::memset(data_.get(), 0, count);
  } else {
    data_ = std::shared_ptr<std::byte>(new std::byte[count](), std::default_delete<std::byte[]>());
  }
}

std::vector<std::unique_ptr<CodedOp>> make_device_coded_ops(const CodingSpace& space) {
  const auto& ops = space.plan.ops();
  const auto on_host = [&](const Op& op, const Codec& codec) {
    return !is_cast(space.plan, op, codec) && !in_groups(space.plan, op, codec);
  };
  bool mirrored = false;
  int rows = 0;
  for (const Op& op : ops) {
    const auto codec = make_codec(op.codec);
    if (!codec || !on_host(op, *codec)) continue;
    mirrored = true;
    rows = std::max(rows, codec->state_rows());
  }
  const auto lanes = std::make_shared<Lanes>(space, mirrored, rows);
  CodingSpace host = space;
  host.flat_buffer = lanes->mirror.data();
  host.codec_state = reinterpret_cast<float*>(lanes->state_mirror.data());
  std::vector<std::unique_ptr<CodedOp>> out;
  auto hosted = make_host_coded_ops(host, on_host);
  for (size_t i = 0; i < ops.size(); ++i) {
    const auto codec = make_codec(ops[i].codec);
    if (!codec) {
      out.push_back(nullptr);
      continue;
    }
    const CodedShare part(ops[i], space.mesh, space.rank, space.size);
    const DType from = space.plan.dtype(ops[i]);
    if (hosted[i]) {
      out.push_back(std::make_unique<HostedOp>(lanes, part, *codec, std::move(hosted[i])));
    } else if (is_cast(space.plan, ops[i], *codec)) {
      out.push_back(std::make_unique<CastOp>(lanes, part, from, codec->message_dtype()));
    } else {
      out.push_back(std::make_unique<GroupsOp>(lanes, part, from, *codec,
                                               MessageLayout(part, *codec), space.seed));
    }
  }
  return out;
}

}  // namespace usbyte
