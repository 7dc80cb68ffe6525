#define BFLOAT16 0
#define linear packed_linear_float32
#define prepare prepare_float32
#define unpack unpack_float32
#include "check_packed_products.h"

int check_packed_products_float32(void) { return check_all_formats(); }
