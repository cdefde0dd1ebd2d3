#include "loops_body.h"

namespace usbyte {

#ifdef USBYTE_HAVE_AVX2
extern const Loops kLoopsAvx2;
#endif

const Loops& loops() {
#ifdef USBYTE_HAVE_AVX2
  static const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  if (avx2) return kLoopsAvx2;
#endif
  return kLoops;
}

const Loops& baseline_loops() { return kLoops; }

}  // namespace usbyte
