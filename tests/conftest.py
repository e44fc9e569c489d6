"""For all tests: no example of a property test fails for how long it takes; machines here are small and shared."""

from hypothesis import settings

settings.register_profile("patient", parent=settings.default, deadline=None)
settings.load_profile("patient")
