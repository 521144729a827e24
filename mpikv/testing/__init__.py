"""Public testing tools: ranks as threads, a reference store, devices and networks for tests.

Networks that are late and ranks that die by a script are in `mpikv.transports.faulty`.
"""
