# SPDX-License-Identifier: Apache-2.0
# nlohmann/json: the distribution's package, or the header-only Python package of the build environment.
find_package(nlohmann_json 3.11 QUIET)
if(NOT nlohmann_json_FOUND)
  find_package(Python QUIET COMPONENTS Interpreter)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c
      "import importlib.util as u, pathlib; print(pathlib.Path(u.find_spec('nlohmann_json').origin).parent / 'include')"
    OUTPUT_VARIABLE USBYTE_JSON_INCLUDE OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
  if(failed)
    message(FATAL_ERROR "nlohmann/json >= 3.11 not found: install Debian's nlohmann-json3-dev "
      "or the Python package nlohmann-json.")
  endif()
  add_library(usbyte_json INTERFACE)
  target_include_directories(usbyte_json SYSTEM INTERFACE ${USBYTE_JSON_INCLUDE})
  add_library(nlohmann_json::nlohmann_json ALIAS usbyte_json)
endif()
