"""Public testing tools: ranks as threads, reference store, conformance suites.

Networks that are late and ranks that die by a script are in `mpikv.transports.faulty`, the virtual time is in
`mpikv.clock`.
"""
