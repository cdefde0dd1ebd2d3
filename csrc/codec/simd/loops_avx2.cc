// SPDX-License-Identifier: Apache-2.0
#include "loops_body.h"

namespace usbyte {

extern const Loops kLoopsAvx2;
const Loops kLoopsAvx2 = kLoops;

}  // namespace usbyte
