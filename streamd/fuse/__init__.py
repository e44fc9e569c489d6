"""The kernel's door: mount(2), and what the kernel asks. Only this room imports pyfuse3 or answers an errno."""
