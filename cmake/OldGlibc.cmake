# SPDX-License-Identifier: Apache-2.0
# USBYTE_GLIBC=2.28 links the extension for that glibc and newer ones, whatever glibc this machine has.
# Objects are compiled as always. The linker of the Python package ziglang has the symbols of each glibc,
# and libstdc++ becomes part of the extension, with its symbols hidden.
set(USBYTE_GLIBC "" CACHE STRING "Oldest glibc that the extension runs on, such as 2.28; empty for this machine's")
if(USBYTE_GLIBC)
  if(NOT CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    message(FATAL_ERROR "USBYTE_GLIBC=${USBYTE_GLIBC} needs g++, not ${CMAKE_CXX_COMPILER_ID}: set CXX=g++.")
  endif()
  find_package(Python REQUIRED COMPONENTS Interpreter)
  # USBYTE_ZIG_PYTHON: an interpreter that has ziglang, where the wheel's own has not.
  set(zig "$ENV{USBYTE_ZIG_PYTHON}")
  if(NOT zig)
    set(zig ${Python_EXECUTABLE})
  endif()
  execute_process(COMMAND ${zig} -m ziglang version OUTPUT_VARIABLE version
    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
  if(failed)
    message(FATAL_ERROR "USBYTE_GLIBC=${USBYTE_GLIBC} needs the Python package ziglang in ${zig}.")
  endif()
  message(STATUS "Linking for glibc ${USBYTE_GLIBC} with zig ${version}")
  foreach(library libstdc++.a libgcc_s.so.1)
    execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=${library}
      OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE)
    if(NOT IS_ABSOLUTE "${found}")
      message(FATAL_ERROR "USBYTE_GLIBC=${USBYTE_GLIBC} needs ${library} of ${CMAKE_CXX_COMPILER}.")
    endif()
    list(APPEND runtimes ${found})
  endforeach()
  list(JOIN runtimes " " runtimes)
  string(CONCAT CMAKE_CXX_CREATE_SHARED_MODULE
    "${zig} -m ziglang cc -target ${CMAKE_SYSTEM_PROCESSOR}-linux-gnu.${USBYTE_GLIBC} -shared -s "
    "-Wl,--version-script=${CMAKE_CURRENT_LIST_DIR}/exports.map -o <TARGET> <OBJECTS> <LINK_LIBRARIES> "
    "${runtimes}")
endif()
