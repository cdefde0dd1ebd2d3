# SPDX-License-Identifier: Apache-2.0
add_library(usbyte_warnings INTERFACE)
target_compile_options(usbyte_warnings INTERFACE -Wall -Wextra -Wpedantic -Wshadow -Wconversion
  -Wno-sign-conversion)
# GCC 12 warns of an overlap in "text" + std::string that cannot be (its bug 105651).
target_compile_options(usbyte_warnings INTERFACE $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>)
option(USBYTE_WERROR "Treat warnings as errors" OFF)
if(USBYTE_WERROR)
  target_compile_options(usbyte_warnings INTERFACE -Werror)
endif()
