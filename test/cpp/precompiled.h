// As llmc/base/precompiled.h, for the tests.
#include <fstream>
#include <random>
#include <set>
#include <sstream>

#include <gtest/gtest.h>

#include "llmc/base/precompiled.h"
