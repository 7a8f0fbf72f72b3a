"""The specification of every kernel, in plain torch, on any device."""
