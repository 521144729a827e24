"""Public testing tools: ranks as threads, reference store, conformance suites."""
