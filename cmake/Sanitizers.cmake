if(USBYTE_SANITIZE)
  add_compile_options(-fsanitize=${USBYTE_SANITIZE} -fno-omit-frame-pointer -g)
  add_link_options(-fsanitize=${USBYTE_SANITIZE})
endif()
