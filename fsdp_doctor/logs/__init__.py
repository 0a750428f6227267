"""Logs of training jobs: failures and the history of memory and step time. Standard library only.

``scan_logs`` is the door. One file per message family (``allocator``, ``device_errors``,
``host_errors``, ``process_ends``) and per framework that prints progress (``progress``).
"""
