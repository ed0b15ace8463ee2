"""Replay an XPU-OJ problem package against a kernel submission, on a MetaX C500, an NVIDIA GPU or no GPU at all."""
