// All kernels as one unit, so that the products they share are compiled once.
#include "attend_back.cpp"
#include "blocks_back.cpp"
#include "lloyd.cpp"
#include "prefill.cpp"
