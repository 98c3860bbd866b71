"""Adaptations of rival methods to the common harness of `pa_core.online`; each must first reproduce its source."""
