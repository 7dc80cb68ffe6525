#define BFLOAT16 0
#define pack pack_float32
#define attend attend_float32
#define tile_rows tile_rows_float32
#define block_bytes block_bytes_float32
#include "check_attention.h"

int check_attention_float32(void) { return check_attention(); }
