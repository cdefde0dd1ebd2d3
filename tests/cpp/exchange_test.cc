// SPDX-License-Identifier: Apache-2.0
#include "usbyte/exchange.h"

#include <gtest/gtest.h>

#include <future>
#include <limits>
#include <numeric>
#include <string>

#include "ranks.h"
#include "usbyte/error.h"

namespace usbyte {
namespace {

using test::message_of;
using test::on_each_rank;

std::span<const std::byte> text(const std::string& s) { return std::as_bytes(std::span(s)); }

std::string text(const Buffer& b) {
  return {reinterpret_cast<const char*>(b.data()), static_cast<size_t>(b.size())};
}

TEST(Buffer, HasItsBytesWhateverItsSize) {
  constexpr int64_t kLarge = int64_t{32} << 20;  // from where on it asks for huge pages
  for (int64_t size : {int64_t{0}, int64_t{1}, int64_t{4095}, kLarge - 1, kLarge, kLarge + 7}) {
    Buffer buffer(size);
    ASSERT_EQ(buffer.size(), size);
    const uintptr_t unit = size < kLarge ? 16 : uintptr_t{2} << 20;
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % unit, 0U);
    for (int64_t i = 0; i < size; i += 4096) buffer.data()[i] = static_cast<std::byte>(i >> 12);
    if (size > 0) buffer.data()[size - 1] = std::byte{99};
    const Buffer moved = std::move(buffer);
    for (int64_t i = 0; i + 1 < size; i += 4096) {
      ASSERT_EQ(moved.bytes()[static_cast<size_t>(i)], static_cast<std::byte>(i >> 12));
    }
    if (size > 0) {
      EXPECT_EQ(moved.bytes().back(), std::byte{99});
    }
  }
}

TEST(Exchange, RanksSwapMessagesOfAnyLength) {
  for (int size : {1, 2, 5}) {
    const auto ranks = make_local_exchanges(size);
    on_each_rank(size, [&](int r) {
      for (int round = 0; round < 20; ++round) {
        const auto message = [&](int from, int to) {
          const auto length = static_cast<size_t>((from * 7 + to * round) % 5 * 1000);
          return std::string(length, static_cast<char>('a' + from));
        };
        std::vector<std::string> sent;
        std::vector<Outgoing> outgoing;
        for (int peer = 0; peer < size; ++peer) sent.push_back(message(r, peer));
        for (int peer = 0; peer < size; ++peer) {
          if (peer != r) outgoing.push_back({peer, text(sent[static_cast<size_t>(peer)])});
        }
        const std::vector<Buffer> got = swap(*ranks[static_cast<size_t>(r)], outgoing);
        for (size_t i = 0; i < got.size(); ++i) {
          EXPECT_EQ(text(got[i]), message(outgoing[i].peer, r));
        }
      }
    });
  }
}

TEST(Exchange, PairsNeedNobodyElse) {
  const auto ranks = make_local_exchanges(4);
  on_each_rank(2, [&](int r) {
    const std::string mine(static_cast<size_t>(r + 1), 'x');
    const Outgoing outgoing{1 - r, text(mine)};
    const std::vector<Buffer> got = swap(*ranks[static_cast<size_t>(r)], std::span(&outgoing, 1));
    EXPECT_EQ(got[0].size(), 2 - r);
  });
}

TEST(Exchange, ALengthThatIsNoneIsAnErrorThatNamesTheRank) {
  for (int64_t announced : {int64_t{-1}, std::numeric_limits<int64_t>::max()}) {
    const auto ranks = make_local_exchanges(2);
    on_each_rank(2, [&](int r) {
      if (r == 1) {
        int64_t theirs = 0;
        const Leg leg{0, std::as_bytes(std::span(&announced, 1)),
                      std::as_writable_bytes(std::span(&theirs, 1))};
        ranks[1]->transfer(std::span(&leg, 1));
        return;
      }
      const Outgoing outgoing{1, text("abc")};
      EXPECT_EQ(message_of<FaultError>([&] { swap(*ranks[0], std::span(&outgoing, 1)); }),
                "rank 1 announced a message of " + std::to_string(announced) +
                    " bytes, for which there is no memory");
    });
  }
}

TEST(Exchange, LengthsThatDifferAreAnErrorOnBothRanks) {
  const auto ranks = make_local_exchanges(2);
  on_each_rank(2, [&](int r) {
    std::vector<std::byte> out(8), in(static_cast<size_t>(8 + r));
    const Leg leg{1 - r, out, in};
    const std::string what = message_of<FaultError>(
        [&] { ranks[static_cast<size_t>(r)]->transfer(std::span(&leg, 1)); });
    EXPECT_NE(what.find("expects 9"), std::string::npos) << what;
  });
}

TEST(Exchange, TheEndOfARankIsAFaultOnTheOthers) {
  for (bool aborts : {false, true}) {
    auto ranks = make_local_exchanges(3);
    on_each_rank(3, [&](int r) {
      auto& mine = ranks[static_cast<size_t>(r)];
      if (r == 2) {
        aborts ? mine->abort() : mine.reset();
        return;
      }
      const std::string word = "hello";
      const Outgoing outgoing{2, text(word)};
      const std::string what =
          message_of<FaultError>([&] { swap(*mine, std::span(&outgoing, 1)); });
      EXPECT_NE(what.find(aborts ? "aborted" : "rank 2 has left"), std::string::npos) << what;
    });
  }
}

TEST(Exchange, WhoHasAllMayLeave) {
  for (int run = 0; run < 200; ++run) {
    auto ranks = make_local_exchanges(2);
    on_each_rank(2, [&](int r) {
      auto& mine = ranks[static_cast<size_t>(r)];
      const std::string word = "hello";
      const Outgoing outgoing{1 - r, text(word)};
      EXPECT_NO_THROW(swap(*mine, std::span(&outgoing, 1)));
      mine.reset();
    });
  }
}

TEST(Exchange, NeedsARank) { EXPECT_THROW(make_local_exchanges(0), UsageError); }

}  // namespace
}  // namespace usbyte
