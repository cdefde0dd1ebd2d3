// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <string>
#include <utility>

#include "support/thread_annotations.h"
#include "usbyte/error.h"
#include "usbyte/exchange.h"

namespace usbyte {
namespace {

// Where the ranks meet. `mutex` guards all of it, but for the bytes of a message, which are the
// receiver's from when it has found the message until it has marked it as taken.
struct Meeting {
  // At most one message at a time, since its sender waits until it has been taken.
  struct Mail {
    std::span<const std::byte> message;
    bool waiting = false;
  };

  explicit Meeting(int n) : size(n), mails(static_cast<size_t>(n) * static_cast<size_t>(n)) {}

  Mail& mail(int from, int to) USBYTE_REQUIRES(mutex) {
    return mails[static_cast<size_t>(from * size + to)];
  }
  void check() const USBYTE_REQUIRES(mutex) {
    if (!fault.empty()) throw FaultError(fault);
  }
  void end(std::string why) USBYTE_REQUIRES(mutex) {
    if (fault.empty()) fault = std::move(why);
    changed.notify_all();
  }

  const int size;
  Mutex mutex;
  ConditionVariable changed;
  std::vector<Mail> mails USBYTE_GUARDED_BY(mutex);
  std::string fault USBYTE_GUARDED_BY(mutex);
};

class LocalExchange final : public Exchange {
 public:
  LocalExchange(int rank, std::shared_ptr<Meeting> meeting)
      : rank_(rank), meeting_(std::move(meeting)) {}
  ~LocalExchange() override {
    MutexLock lock(meeting_->mutex);
    meeting_->end("rank " + std::to_string(rank_) + " has left the exchange");
  }

  int rank() const override { return rank_; }
  int size() const override { return meeting_->size; }

  void transfer(std::span<const Leg> legs) override {
    Meeting& m = *meeting_;
    MutexLock lock(m.mutex);
    m.check();
    for (const Leg& leg : legs) {
      if (!leg.send.empty()) m.mail(rank_, leg.peer) = {leg.send, true};
    }
    m.changed.notify_all();
    for (const Leg& leg : legs) {
      if (!leg.receive.empty()) receive(m, leg);
    }
    while (m.fault.empty() && !all_taken(m, legs)) m.changed.wait(m.mutex);
    if (!all_taken(m, legs)) m.check();  // the rank that took the last of it may have left since
  }

  void abort() override {
    MutexLock lock(meeting_->mutex);
    meeting_->end("the exchange was aborted");
  }

 private:
  bool all_taken(Meeting& m, std::span<const Leg> legs) const USBYTE_REQUIRES(m.mutex) {
    for (const Leg& leg : legs) {
      if (!leg.send.empty() && m.mail(rank_, leg.peer).waiting) return false;
    }
    return true;
  }

  void receive(Meeting& m, const Leg& leg) const USBYTE_REQUIRES(m.mutex) {
    Meeting::Mail& mail = m.mail(leg.peer, rank_);
    while (m.fault.empty() && !mail.waiting) m.changed.wait(m.mutex);
    m.check();
    const std::span<const std::byte> message = mail.message;
    if (message.size() != leg.receive.size()) {
      m.end("rank " + std::to_string(leg.peer) + " sent " + std::to_string(message.size()) +
            " bytes where rank " + std::to_string(rank_) + " expects " +
            std::to_string(leg.receive.size()));
      m.check();
    }
    std::memcpy(leg.receive.data(), message.data(), message.size());
    mail.waiting = false;
    m.changed.notify_all();
  }

  const int rank_;
  const std::shared_ptr<Meeting> meeting_;
};

}  // namespace

std::vector<std::unique_ptr<Exchange>> make_local_exchanges(int size) {
  if (size < 1) {
    throw UsageError("make_local_exchanges: size " + std::to_string(size) + " must be at least 1");
  }
  const auto meeting = std::make_shared<Meeting>(size);
  std::vector<std::unique_ptr<Exchange>> out;
  for (int r = 0; r < size; ++r) out.push_back(std::make_unique<LocalExchange>(r, meeting));
  return out;
}

}  // namespace usbyte
