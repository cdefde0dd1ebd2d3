// SPDX-License-Identifier: Apache-2.0
#include "loops_body.h"

namespace usbyte {

#ifdef USBYTE_HAVE_AVX2
extern const Loops kLoopsAvx2;
#endif

const Loops& loops() {
#ifdef USBYTE_HAVE_AVX2
  // Every processor with AVX2 has F16C, too, for which older clangs cannot ask.
  static const bool avx2 = __builtin_cpu_supports("avx2");
  if (avx2) return kLoopsAvx2;
#endif
  return kLoops;
}

const Loops& baseline_loops() { return kLoops; }

}  // namespace usbyte
