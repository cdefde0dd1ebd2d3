# SPDX-License-Identifier: Apache-2.0
if(USBYTE_SANITIZE)
  add_compile_options(-fsanitize=${USBYTE_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -g1)
  add_compile_definitions(USBYTE_SANITIZED)
  add_link_options(-fsanitize=${USBYTE_SANITIZE})
endif()
