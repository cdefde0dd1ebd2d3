# SPDX-License-Identifier: Apache-2.0
# ccache, where it is installed: what was compiled before is not compiled again, in any build folder
# and in any clone.
find_program(USBYTE_CCACHE ccache)
mark_as_advanced(USBYTE_CCACHE)
if(USBYTE_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  # Precompiled headers are cached with these settings only; see "Precompiled headers" in its manual.
  # Paths below the source folder are hashed as relative ones, so that clones share what they compile.
  set(CMAKE_CXX_COMPILER_LAUNCHER env CCACHE_SLOPPINESS=pch_defines,time_macros
    CCACHE_BASEDIR=${CMAKE_SOURCE_DIR} CCACHE_NOHASHDIR=1 ${USBYTE_CCACHE})
  if(NOT CMAKE_CUDA_COMPILER_LAUNCHER)
    set(CMAKE_CUDA_COMPILER_LAUNCHER ${CMAKE_CXX_COMPILER_LAUNCHER})
  endif()
  add_compile_options($<$<COMPILE_LANG_AND_ID:CXX,GNU>:-fpch-preprocess>
    "$<$<COMPILE_LANG_AND_ID:CXX,Clang>:SHELL:-Xclang -fno-pch-timestamp>")
endif()
