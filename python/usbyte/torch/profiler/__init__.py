"""Records what a script does, for planning without usbyte in it."""
