"""One rank's training steps on fake tensors: memory at any world size, without a GPU.

``estimate`` starts a child process (this package patches torch there) and needs no torch itself.
"""
