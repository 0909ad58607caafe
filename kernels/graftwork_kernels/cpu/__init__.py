"""Operators in C++ for the CPU, compiled on first use by the system compiler. Refuses to know what a step is for."""
