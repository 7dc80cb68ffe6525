#define BFLOAT16 1
#define linear packed_linear_bfloat16
#define prepare prepare_bfloat16
#define unpack unpack_bfloat16
#include "check_packed_products.h"

int check_packed_products_bfloat16(void) { return check_all_formats(); }
