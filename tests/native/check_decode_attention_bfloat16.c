#define BFLOAT16 1
#define attend_all attend_all_bfloat16
#include "check_decode_attention.h"

int check_decode_attention_bfloat16(void) { return check_decode_attention(); }
