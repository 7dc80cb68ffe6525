#define BFLOAT16 1
#define pack pack_bfloat16
#define attend attend_bfloat16
#define tile_rows tile_rows_bfloat16
#define block_bytes block_bytes_bfloat16
#include "check_attention.h"

int check_attention_bfloat16(void) { return check_attention(); }
