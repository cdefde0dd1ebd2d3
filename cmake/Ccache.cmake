# SPDX-License-Identifier: Apache-2.0
# ccache, where it is installed: what was compiled before, in any build folder, is not compiled again.
find_program(USBYTE_CCACHE ccache)
mark_as_advanced(USBYTE_CCACHE)
if(USBYTE_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # Precompiled headers are cached with these settings only; see "Precompiled headers" in its manual.
  set(CMAKE_CXX_COMPILER_LAUNCHER env CCACHE_SLOPPINESS=pch_defines,time_macros ${USBYTE_CCACHE})
  add_compile_options($<$<COMPILE_LANG_AND_ID:CXX,GNU>:-fpch-preprocess>
    "$<$<COMPILE_LANG_AND_ID:CXX,Clang>:SHELL:-Xclang -fno-pch-timestamp>")
endif()
