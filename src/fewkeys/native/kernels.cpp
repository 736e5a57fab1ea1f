// All kernels as one unit, so that the products they share are compiled once.
#include "attend.cpp"
#include "backward.cpp"
#include "lloyd.cpp"
#include "prefill.cpp"
