#pragma once
#include "cuda_bf16.h"

using maca_bfloat16 = __nv_bfloat16;
using maca_bfloat162 = __nv_bfloat162;
using __maca_bfloat16 = __nv_bfloat16;
using __maca_bfloat162 = __nv_bfloat162;
