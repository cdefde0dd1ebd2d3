add_library(usbyte_warnings INTERFACE)
target_compile_options(usbyte_warnings INTERFACE -Wall -Wextra -Wpedantic -Wshadow -Wconversion
  -Wno-sign-conversion)
option(USBYTE_WERROR "Treat warnings as errors" OFF)
if(USBYTE_WERROR)
  target_compile_options(usbyte_warnings INTERFACE -Werror)
endif()
