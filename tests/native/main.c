#include "check.h"

int main(void) {
    int failed = check_low_bit() + check_best_scores() + check_row_products_bfloat16() + check_row_products_float32();
    failed += check_packed_products_bfloat16() + check_packed_products_float32();
    failed += check_attention_bfloat16() + check_attention_float32();
    failed += check_decode_attention_bfloat16() + check_decode_attention_float32();
    printf("%d differences\n", failed);
    return failed > 0;
}
