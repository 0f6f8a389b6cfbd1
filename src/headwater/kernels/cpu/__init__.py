"""The native CPU kernels: C++ sources, and how they are compiled, chosen and loaded."""
