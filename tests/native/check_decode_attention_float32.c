#define BFLOAT16 0
#define attend_all attend_all_float32
#include "check_decode_attention.h"

int check_decode_attention_float32(void) { return check_decode_attention(); }
