"""Public testing tools: ranks as threads, a reference store, devices and networks for tests.

Networks that are late by a script are in `mpikv.transports.faulty`.
"""
