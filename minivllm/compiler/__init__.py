"""The compiler: one trace of the plain model becomes a prefill and a decode graph, pass by pass."""
