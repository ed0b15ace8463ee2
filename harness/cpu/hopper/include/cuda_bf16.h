#pragma once
#include "model.hpp"
