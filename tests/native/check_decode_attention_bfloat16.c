#define BFLOAT16 1
#define attend_part attend_part_bfloat16
#define finish finish_bfloat16
#include "check_decode_attention.h"

int check_decode_attention_bfloat16(void) { return check_decode_attention(); }
