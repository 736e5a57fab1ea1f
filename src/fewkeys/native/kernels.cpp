// All kernels as one unit, so that the products they share are compiled once.
#include "attend.cpp"
#include "keys.cpp"
#include "prefill.cpp"
